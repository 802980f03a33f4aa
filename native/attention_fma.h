// Attention's matrix products by fused multiply-adds in float32: of float32 caches, and of bfloat16 caches, widened
// on the way.
#pragma once

#include <type_traits>

#include "attention_impl.h"

namespace pf::PF_ISA {
namespace {

constexpr int kRowsAtOnce = 4;  // with two vectors a row: eight independent sums hide the latency of an FMA

template <class Cache>
struct FmaMath {
    using T = Cache;
    using Q = float;
    using W = float;
    static constexpr bool kPaired = std::is_same_v<T, Bf16>;

    explicit FmaMath(int) {}

    static void pack(const T* q, int dim, int d_pad, float* out) {
        for (int d = 0; d < d_pad; d += kWidth) {
            const int n = clamp(dim - d, 0, kWidth);
            store(out + d, n == kWidth ? load(q + d) : n > 0 ? load_first(q + d, n) : zero());
        }
    }

    static void store_weights(float* out, Vec p) {
        if constexpr (kPaired) p = widen(round_bf16(p));
        store(out, p);
    }

    // Vector i of the tokens.
    PF_INLINE const T* keys_at(const T* const* k, int i) {
        const int token = i * kWidth;
        return k[token / kGroup] + token % kGroup * (kPaired ? 2 : 1);
    }

    template <int kRows, int kVectors>
    PF_INLINE void score_block(const float* q, int d_pad, const T* const* k, int vector, float* out) {
        Vec sums[kRows][kVectors];
        const T* keys[kVectors];
        PF_UNROLL
        for (int j = 0; j < kVectors; ++j) {
            keys[j] = keys_at(k, vector + j);
            PF_UNROLL
            for (int r = 0; r < kRows; ++r) sums[r][j] = zero();
        }
        for (int d = 0; d < d_pad; d += kPaired ? 2 : 1) {
            PF_UNROLL
            for (int j = 0; j < kVectors; ++j) {
                if constexpr (kPaired) {
                    const VecI pairs = load_int(keys[j] + d * kGroup);
                    const Vec first = pair_first(pairs), second = pair_second(pairs);
                    PF_UNROLL
                    for (int r = 0; r < kRows; ++r) {
                        sums[r][j] = fma(set1(q[r * d_pad + d]), first, sums[r][j]);
                        sums[r][j] = fma(set1(q[r * d_pad + d + 1]), second, sums[r][j]);
                    }
                } else {
                    const Vec key = load(keys[j] + d * kGroup);
                    PF_UNROLL
                    for (int r = 0; r < kRows; ++r) sums[r][j] = fma(set1(q[r * d_pad + d]), key, sums[r][j]);
                }
            }
        }
        PF_UNROLL
        for (int r = 0; r < kRows; ++r) {
            PF_UNROLL
            for (int j = 0; j < kVectors; ++j) store(out + r * kScoreStride + (vector + j) * kWidth, sums[r][j]);
        }
    }

    template <int kRows>
    static void score_rows(const float* q, int d_pad, const T* const* k, int groups, float* out) {
        const int vectors = groups * (kGroup / kWidth);
        int i = 0;
        for (; i + 2 <= vectors; i += 2) score_block<kRows, 2>(q, d_pad, k, i, out);
        if (i < vectors) score_block<kRows, 1>(q, d_pad, k, i, out);
    }

    static void scores(const float* q, int rows, int d_pad, const T* const* k, int groups, float* out) {
        for (int r = 0; r < rows; r += kRowsAtOnce, q += kRowsAtOnce * d_pad, out += kRowsAtOnce * kScoreStride) {
            switch (rows - r) {
                case 1: score_rows<1>(q, d_pad, k, groups, out); break;
                case 2: score_rows<2>(q, d_pad, k, groups, out); break;
                case 3: score_rows<3>(q, d_pad, k, groups, out); break;
                default: score_rows<4>(q, d_pad, k, groups, out);
            }
        }
    }

    // Two vectors of the head dim.
    template <int kRows>
    PF_INLINE void value_block(const float* weights, int d_pad, const T* const* v, int groups, int dim, float* out) {
        Vec sums[kRows][2];
        PF_UNROLL
        for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = zero();
        for (int g = 0; g < groups; ++g) {
            for (int t = 0; t < kGroup; t += kPaired ? 2 : 1) {
                const T* values = v[g] + t * d_pad + dim * (kPaired ? 2 : 1);
                const float* w = weights + g * kGroup + t;
                PF_UNROLL
                for (int j = 0; j < 2; ++j) {
                    if constexpr (kPaired) {
                        const VecI pairs = load_int(values + j * 2 * kWidth);
                        const Vec first = pair_first(pairs), second = pair_second(pairs);
                        PF_UNROLL
                        for (int r = 0; r < kRows; ++r) {
                            sums[r][j] = fma(set1(w[r * kScoreStride]), first, sums[r][j]);
                            sums[r][j] = fma(set1(w[r * kScoreStride + 1]), second, sums[r][j]);
                        }
                    } else {
                        const Vec value = load(values + j * kWidth);
                        PF_UNROLL
                        for (int r = 0; r < kRows; ++r) {
                            sums[r][j] = fma(set1(w[r * kScoreStride]), value, sums[r][j]);
                        }
                    }
                }
            }
        }
        PF_UNROLL
        for (int r = 0; r < kRows; ++r) {
            store(out + r * d_pad + dim, sums[r][0]);
            store(out + r * d_pad + dim + kWidth, sums[r][1]);
        }
    }

    template <int kRows>
    static void value_rows(const float* weights, int d_pad, const T* const* v, int groups, float* out) {
        for (int d = 0; d < d_pad; d += 2 * kWidth) value_block<kRows>(weights, d_pad, v, groups, d, out);
    }

    static void values(const float* weights, int rows, int d_pad, const T* const* v, int groups, float* out) {
        for (int r = 0; r < rows;
             r += kRowsAtOnce, weights += kRowsAtOnce * kScoreStride, out += kRowsAtOnce * d_pad) {
            switch (rows - r) {
                case 1: value_rows<1>(weights, d_pad, v, groups, out); break;
                case 2: value_rows<2>(weights, d_pad, v, groups, out); break;
                case 3: value_rows<3>(weights, d_pad, v, groups, out); break;
                default: value_rows<4>(weights, d_pad, v, groups, out);
            }
        }
    }
};

}  // namespace
}  // namespace pf::PF_ISA
