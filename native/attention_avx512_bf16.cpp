// Attention over bfloat16 caches by dot products of bfloat16 pairs (VDPBF16PS).
#define PF_ISA avx512_bf16
#include "attention_impl.h"

namespace pf::avx512_bf16 {
namespace {

struct DotMath {
    using T = Bf16;
    using Q = Bf16;
    using W = Bf16;
    static constexpr int kRowsAtOnce = 4;

    explicit DotMath(int) {}

    static void pack(const Bf16* q, int dim, int d_pad, Bf16* out) { pack_bf16(q, dim, d_pad, out); }

    static void store_weights(Bf16* out, Vec p) { store(out, p); }

    PF_INLINE Vec dot(Vec sum, __m512i pairs, const Bf16* pair) {
        std::int32_t bits;
        std::memcpy(&bits, pair, sizeof bits);
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)pairs);
    }

    template <int kRows, int kGroups>
    PF_INLINE void score_block(const Bf16* q, int d_pad, const T* const* k, float* out) {
        Vec sums[kRows][kGroups];
        PF_UNROLL
        for (int r = 0; r < kRows; ++r) {
            PF_UNROLL
            for (int j = 0; j < kGroups; ++j) sums[r][j] = zero();
        }
        for (int d = 0; d < d_pad; d += 2) {
            PF_UNROLL
            for (int j = 0; j < kGroups; ++j) {
                const __m512i pairs = load_int(k[j] + d * kGroup);
                PF_UNROLL
                for (int r = 0; r < kRows; ++r) sums[r][j] = dot(sums[r][j], pairs, q + r * d_pad + d);
            }
        }
        PF_UNROLL
        for (int r = 0; r < kRows; ++r) {
            PF_UNROLL
            for (int j = 0; j < kGroups; ++j) store(out + r * kScoreStride + j * kGroup, sums[r][j]);
        }
    }

    template <int kRows>
    static void score_rows(const Bf16* q, int d_pad, const T* const* k, int groups, float* out) {
        int g = 0;
        for (; g + 2 <= groups; g += 2) score_block<kRows, 2>(q, d_pad, k + g, out + g * kGroup);
        if (g < groups) score_block<kRows, 1>(q, d_pad, k + g, out + g * kGroup);
    }

    static void scores(const Bf16* q, int rows, int d_pad, const T* const* k, int groups, float* out) {
        for (int r = 0; r < rows; r += kRowsAtOnce, q += kRowsAtOnce * d_pad, out += kRowsAtOnce * kScoreStride) {
            switch (rows - r) {
                case 1: score_rows<1>(q, d_pad, k, groups, out); break;
                case 2: score_rows<2>(q, d_pad, k, groups, out); break;
                case 3: score_rows<3>(q, d_pad, k, groups, out); break;
                default: score_rows<4>(q, d_pad, k, groups, out);
            }
        }
    }

    template <int kRows>
    static void value_rows(const Bf16* weights, int d_pad, const T* const* v, int groups, float* out) {
        for (int d = 0; d < d_pad; d += 2 * kWidth) {
            Vec sums[kRows][2];
            PF_UNROLL
            for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = zero();
            for (int g = 0; g < groups; ++g) {
                for (int t = 0; t < kGroup; t += 2) {
                    PF_UNROLL
                    for (int j = 0; j < 2; ++j) {
                        const __m512i pairs = load_int(v[g] + t * d_pad + (d + j * kWidth) * 2);
                        PF_UNROLL
                        for (int r = 0; r < kRows; ++r) {
                            sums[r][j] = dot(sums[r][j], pairs, weights + r * 2 * kScoreStride + g * kGroup + t);
                        }
                    }
                }
            }
            PF_UNROLL
            for (int r = 0; r < kRows; ++r) {
                store(out + r * d_pad + d, sums[r][0]);
                store(out + r * d_pad + d + kWidth, sums[r][1]);
            }
        }
    }

    static void values(const Bf16* weights, int rows, int d_pad, const T* const* v, int groups, float* out) {
        for (int r = 0; r < rows;
             r += kRowsAtOnce, weights += kRowsAtOnce * 2 * kScoreStride, out += kRowsAtOnce * d_pad) {
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

const AttentionTable attention_bf16 = table_of<DotMath>();

}  // namespace pf::avx512_bf16
