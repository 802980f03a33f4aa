#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "linear.h"

namespace pf::avx512_bf16 {
namespace {

#include "linear_simd.h"
#include "linear_zmm.h"

inline __m512bh broadcast_pair(const std::uint16_t* pair) {
    std::uint32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(bits));
}

// bf16 weights: vdpbf16ps adds the products of two inputs at once.
template <int R>
void block_bf16(const LinearShare& s, std::int64_t row, std::int64_t unit, const Prefetch& prefetch) {
    __m512 sums[R][2];
    const std::uint16_t* x[R];
    PF_UNROLL
    for (int r = 0; r < R; ++r) {
        x[r] = x_row_bf16(s, row + r);
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    }
    const char* w = static_cast<const char*>(unit_data(s, unit));
    alignas(64) std::uint16_t padded[R][kKBlock];
    for (std::int64_t k = 0; k < s.w.k; k += kKBlock, w += kKBlock * kUnit * 2) {
        if (s.w.k - k < kKBlock) {
            const __mmask32 mask = (1u << (s.w.k - k)) - 1u;
            PF_UNROLL
            for (int r = 0; r < R; ++r) {
                _mm512_store_si512(padded[r], _mm512_maskz_loadu_epi16(mask, x[r]));
                x[r] = padded[r];
            }
        }
        for (int pair = 0; pair < 16; ++pair) {
            prefetch(w + pair * 128, pair * 2);
            prefetch(w + pair * 128 + 64, pair * 2 + 1);
            const auto b0 = (__m512bh)_mm512_load_si512(w + pair * 64);
            const auto b1 = (__m512bh)_mm512_load_si512(w + 1024 + pair * 64);
            PF_UNROLL
            for (int r = 0; r < R; ++r) {
                const __m512bh a = broadcast_pair(x[r] + 2 * pair);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], a, b0);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], a, b1);
            }
        }
        PF_UNROLL
        for (int r = 0; r < R; ++r) x[r] += kKBlock;
    }
    PF_UNROLL
    for (int r = 0; r < R; ++r) store_sums<Zmm>(s, row + r, unit, sums[r]);
}

constexpr int kMaxRows = 8;  // 16 sums, two weights, one input; more rows would not be faster

}  // namespace

void linear_bf16(const LinearShare& s) {
    for_each_block<kMaxRows>(s, [&](auto r, auto... args) { block_bf16<decltype(r)::value>(s, args...); });
}

}  // namespace pf::avx512_bf16
