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
template <int R, int U>
void block_bf16(const LinearShare& s, std::int64_t row, std::int64_t unit, const Prefetch& prefetch) {
    __m512 sums[R * U];
    const std::uint16_t* x[R];
    PF_UNROLL
    for (int r = 0; r < R; ++r) x[r] = x_row_bf16(s, row + r);
    PF_UNROLL
    for (int i = 0; i < R * U; ++i) sums[i] = _mm512_setzero_ps();
    const char* w = unit_data(s, unit);
    const std::int64_t bytes = unit_bytes(s.w);
    alignas(64) std::uint16_t padded[R][kKBlock];
    for (std::int64_t k = 0; k < s.w.k; k += kKBlock) {
        if (s.w.k - k < kKBlock) {
            const __mmask32 mask = (1u << (s.w.k - k)) - 1u;
            PF_UNROLL
            for (int r = 0; r < R; ++r) {
                _mm512_store_si512(padded[r], _mm512_maskz_loadu_epi16(mask, x[r]));
                x[r] = padded[r];
            }
        }
        const std::int64_t ahead = prefetch.ahead(k / 2 * kLine);
        const int first_line = static_cast<int>(k / 2 % 32);
        for (int pair = 0; pair < 16; ++pair, w += kLine) {
            __m512bh b[U];
            PF_UNROLL
            for (int u = 0; u < U; ++u) {
                prefetch(w + u * bytes + ahead, first_line + pair);
                b[u] = (__m512bh)_mm512_load_si512(w + u * bytes);
            }
            PF_UNROLL
            for (int r = 0; r < R; ++r) {
                const __m512bh a = broadcast_pair(x[r] + 2 * pair);
                PF_UNROLL
                for (int u = 0; u < U; ++u) sums[r * U + u] = _mm512_dpbf16_ps(sums[r * U + u], a, b[u]);
            }
        }
        PF_UNROLL
        for (int r = 0; r < R; ++r) x[r] += kKBlock;
    }
    store_block<Zmm, R, U>(s, row, unit, sums);
}

// 32 registers: 16 sums (4 rows by 4 units, 8 by 2), four weights, one input; more sums would not be faster.
constexpr int kQuadRows = 4, kMaxRows = 8;

}  // namespace

void linear_bf16(const LinearShare& s) {
    for_each_block<kQuadRows, kMaxRows>(s, [&](auto r, auto u, auto... args) {
        block_bf16<decltype(r)::value, decltype(u)::value>(s, args...);
    });
}

}  // namespace pf::avx512_bf16
