#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "linear.h"

namespace pf::avx2 {
namespace {

#include "linear_simd.h"

struct Ymm {
    using reg = __m256;
    static constexpr int kWidth = 8;

    static reg zero() { return _mm256_setzero_ps(); }
    static reg set1(float value) { return _mm256_set1_ps(value); }
    static reg load(const float* p) { return _mm256_load_ps(p); }
    static void store(float* p, reg v) { _mm256_store_ps(p, v); }
    static void storeu(float* p, reg v) { _mm256_storeu_ps(p, v); }
    static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
    static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }

    static __m256i load_pairs(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
    static reg widen_even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
    static reg widen_odd(__m256i pairs) {
        return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }

    // 32 inputs of a row to float32, zeros after the first `count`.
    static void widen_block(const std::uint16_t* x, std::int64_t count, float* out) {
        alignas(32) std::uint16_t padded[kKBlock];
        if (count < kKBlock) {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, x, static_cast<std::size_t>(count) * 2);
            x = padded;
        }
        for (int i = 0; i < kKBlock; i += 8) {
            const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i));
            store(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
        }
    }

    // Rounds to nearest even; a NaN stays one.
    static void store_bf16(std::uint16_t* p, reg v) {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
        const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
};

// 16 registers: at most 12 sums (3 rows by 2 units, 1 row by 4), and the rest for an input and weights.
constexpr int kQuadRows = 1, kMaxRows = 3;

}  // namespace

void linear_f32(const LinearShare& s) {
    for_each_block<kQuadRows, kMaxRows>(s, [&](auto r, auto u, auto... args) {
        block_f32<Ymm, decltype(r)::value, decltype(u)::value>(s, args...);
    });
}

void linear_bf16(const LinearShare& s) {
    for_each_block<kQuadRows, kMaxRows>(s, [&](auto r, auto u, auto... args) {
        block_bf16_widened<Ymm, decltype(r)::value, decltype(u)::value>(s, args...);
    });
}

}  // namespace pf::avx2
