// Vectors of float32 for kernels that are compiled once per instruction set.
//
// A translation unit defines PF_ISA (avx2, avx512, avx512_bf16 or amx), is compiled with that set's flags, and gets the
// functions below in namespace pf::PF_ISA, so that two sets never share a symbol. Fused multiply-adds happen only where
// the code says fma: the compiler runs with -ffp-contract=off.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's header leaves the operand that a full mask ignores uninitialized, and warns of it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cstdint>
#include <cstring>

#ifndef PF_ISA
#error "define PF_ISA before including simd.h"
#endif
#define PF_INLINE static inline __attribute__((always_inline))
// For loops over an array of vectors: only unrolled do they stay in registers.
#define PF_UNROLL _Pragma("GCC unroll 16")

namespace pf {

// The bits of a bfloat16.
struct Bf16 {
    std::uint16_t bits;
};

}  // namespace pf

namespace pf::PF_ISA {

#if defined(__AVX512F__)

// 16 lanes.
using Vec = __m512;
using VecI = __m512i;
using Mask = __mmask16;
constexpr int kWidth = 16;

PF_INLINE Vec zero() { return _mm512_setzero_ps(); }
PF_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
PF_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
PF_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
PF_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
PF_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
PF_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
PF_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
PF_INLINE Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
PF_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
PF_INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
PF_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
PF_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
PF_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PF_INLINE Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

PF_INLINE Mask first_lanes(int n) { return static_cast<Mask>((1u << n) - 1u); }
PF_INLINE Mask bits_mask(std::uint32_t bits) { return static_cast<Mask>(bits); }
PF_INLINE Mask greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
PF_INLINE Mask greater_equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
PF_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
PF_INLINE bool any(Mask m) { return m != 0; }
PF_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
PF_INLINE Vec keep(Mask m, Vec x) { return _mm512_maskz_mov_ps(m, x); }
PF_INLINE VecI select(Mask m, VecI yes, VecI no) { return _mm512_mask_blend_epi32(m, no, yes); }

PF_INLINE Vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
PF_INLINE void store_first(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

PF_INLINE VecI set1_int(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
PF_INLINE VecI load_int(const void* p) { return _mm512_loadu_si512(p); }
PF_INLINE void store_int(void* p, VecI x) { _mm512_storeu_si512(p, x); }
PF_INLINE VecI add_int(VecI a, VecI b) { return _mm512_add_epi32(a, b); }
PF_INLINE VecI sub_int(VecI a, VecI b) { return _mm512_sub_epi32(a, b); }
PF_INLINE VecI and_int(VecI a, VecI b) { return _mm512_and_si512(a, b); }
PF_INLINE VecI xor_int(VecI a, VecI b) { return _mm512_xor_si512(a, b); }
template <int N>
PF_INLINE VecI shift_left(VecI a) {
    return _mm512_slli_epi32(a, N);
}
template <int N>
PF_INLINE VecI shift_right(VecI a) {
    return _mm512_srli_epi32(a, N);
}
template <int N>
PF_INLINE VecI shift_right_signed(VecI a) {
    return _mm512_srai_epi32(a, N);
}
PF_INLINE Vec as_float(VecI a) { return _mm512_castsi512_ps(a); }
PF_INLINE VecI as_int(Vec a) { return _mm512_castps_si512(a); }
PF_INLINE Vec to_float(VecI a) { return _mm512_cvtepi32_ps(a); }
PF_INLINE VecI to_int(Vec a) { return _mm512_cvtps_epi32(a); }

// 64-bit products of 32-bit numbers, as their high and low halves.
PF_INLINE void multiply_high_low(VecI a, VecI b, VecI& high, VecI& low) {
    const VecI even = _mm512_mul_epu32(a, b);
    const VecI odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
    low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}
PF_INLINE VecI unpack_low32(VecI a, VecI b) { return _mm512_unpacklo_epi32(a, b); }
PF_INLINE VecI unpack_high32(VecI a, VecI b) { return _mm512_unpackhi_epi32(a, b); }
PF_INLINE VecI unpack_low64(VecI a, VecI b) { return _mm512_unpacklo_epi64(a, b); }
PF_INLINE VecI unpack_high64(VecI a, VecI b) { return _mm512_unpackhi_epi64(a, b); }

PF_INLINE __m256 upper(Vec x) { return _mm512_extractf32x8_ps(x, 1); }
PF_INLINE __m256 fold_sum(Vec x) { return _mm256_add_ps(_mm512_castps512_ps256(x), upper(x)); }
PF_INLINE __m256 fold_max(Vec x) { return _mm256_max_ps(_mm512_castps512_ps256(x), upper(x)); }

PF_INLINE Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

PF_INLINE __m256i round_bf16(Vec x) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const VecI bits = as_int(x);
    const VecI odd = and_int(shift_right<16>(bits), set1_int(1));
    const VecI rounded = shift_right<16>(add_int(add_int(bits, set1_int(0x7fff)), odd));
    const VecI quiet = _mm512_or_si512(shift_right<16>(bits), set1_int(0x40));
    return _mm512_cvtepi32_epi16(select(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet, rounded));
#endif
}
PF_INLINE Vec widen(__m256i x) { return as_float(shift_left<16>(_mm512_cvtepu16_epi32(x))); }
PF_INLINE Vec load(const Bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
PF_INLINE void store(Bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(x)); }
PF_INLINE Vec load_first(const Bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
PF_INLINE void store_first(Bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), round_bf16(x)); }

#else

// 8 lanes.
using Vec = __m256;
using VecI = __m256i;
using Mask = __m256;  // all bits of a lane are set, or none
constexpr int kWidth = 8;

PF_INLINE Vec zero() { return _mm256_setzero_ps(); }
PF_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
PF_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
PF_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
PF_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
PF_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
PF_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
PF_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
PF_INLINE Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
PF_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
PF_INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }
PF_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
PF_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
PF_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
PF_INLINE Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

PF_INLINE VecI set1_int(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
PF_INLINE VecI load_int(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
PF_INLINE void store_int(void* p, VecI x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
PF_INLINE VecI add_int(VecI a, VecI b) { return _mm256_add_epi32(a, b); }
PF_INLINE VecI sub_int(VecI a, VecI b) { return _mm256_sub_epi32(a, b); }
PF_INLINE VecI and_int(VecI a, VecI b) { return _mm256_and_si256(a, b); }
PF_INLINE VecI xor_int(VecI a, VecI b) { return _mm256_xor_si256(a, b); }
template <int N>
PF_INLINE VecI shift_left(VecI a) {
    return _mm256_slli_epi32(a, N);
}
template <int N>
PF_INLINE VecI shift_right(VecI a) {
    return _mm256_srli_epi32(a, N);
}
template <int N>
PF_INLINE VecI shift_right_signed(VecI a) {
    return _mm256_srai_epi32(a, N);
}
PF_INLINE Vec as_float(VecI a) { return _mm256_castsi256_ps(a); }
PF_INLINE VecI as_int(Vec a) { return _mm256_castps_si256(a); }
PF_INLINE Vec to_float(VecI a) { return _mm256_cvtepi32_ps(a); }
PF_INLINE VecI to_int(Vec a) { return _mm256_cvtps_epi32(a); }

PF_INLINE VecI lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
PF_INLINE Mask first_lanes(int n) { return as_float(_mm256_cmpgt_epi32(set1_int(n), lane_numbers())); }
PF_INLINE Mask bits_mask(std::uint32_t bits) {
    const VecI bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return as_float(_mm256_cmpeq_epi32(and_int(set1_int(bits), bit), bit));
}
PF_INLINE Mask greater(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
PF_INLINE Mask greater_equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
PF_INLINE Mask equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
PF_INLINE bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
PF_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }
PF_INLINE Vec keep(Mask m, Vec x) { return _mm256_and_ps(m, x); }
PF_INLINE VecI select(Mask m, VecI yes, VecI no) { return as_int(select(m, as_float(yes), as_float(no))); }

PF_INLINE Vec load_first(const float* p, int n) { return _mm256_maskload_ps(p, as_int(first_lanes(n))); }
PF_INLINE void store_first(float* p, Vec x, int n) { _mm256_maskstore_ps(p, as_int(first_lanes(n)), x); }

PF_INLINE void multiply_high_low(VecI a, VecI b, VecI& high, VecI& low) {
    const VecI even = _mm256_mul_epu32(a, b);
    const VecI odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
PF_INLINE VecI unpack_low32(VecI a, VecI b) { return _mm256_unpacklo_epi32(a, b); }
PF_INLINE VecI unpack_high32(VecI a, VecI b) { return _mm256_unpackhi_epi32(a, b); }
PF_INLINE VecI unpack_low64(VecI a, VecI b) { return _mm256_unpacklo_epi64(a, b); }
PF_INLINE VecI unpack_high64(VecI a, VecI b) { return _mm256_unpackhi_epi64(a, b); }

PF_INLINE __m256 fold_sum(Vec x) { return x; }
PF_INLINE __m256 fold_max(Vec x) { return x; }

// x * 2^n for integral n in [-126, 127].
PF_INLINE Vec scale_by_power(Vec x, Vec n) {
    return mul(x, as_float(shift_left<23>(add_int(to_int(n), set1_int(127)))));
}

PF_INLINE __m128i round_bf16(Vec x) {
    const VecI bits = as_int(x);
    const VecI odd = and_int(shift_right<16>(bits), set1_int(1));
    const VecI rounded = shift_right<16>(add_int(add_int(bits, set1_int(0x7fff)), odd));
    const VecI quiet = _mm256_or_si256(shift_right<16>(bits), set1_int(0x40));
    const VecI wide = select(_mm256_cmp_ps(x, x, _CMP_UNORD_Q), quiet, rounded);
    return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
PF_INLINE Vec widen(__m128i x) { return as_float(shift_left<16>(_mm256_cvtepu16_epi32(x))); }
PF_INLINE Vec load(const Bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
PF_INLINE void store(Bf16* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_bf16(x)); }
PF_INLINE Vec load_first(const Bf16* p, int n) {
    Bf16 buffer[8] = {};
    std::memcpy(buffer, p, static_cast<std::size_t>(n) * sizeof(Bf16));
    return load(buffer);
}
PF_INLINE void store_first(Bf16* p, Vec x, int n) {
    Bf16 buffer[8];
    store(buffer, x);
    std::memcpy(p, buffer, static_cast<std::size_t>(n) * sizeof(Bf16));
}

#endif

// Lanes are summed pairwise in one fixed order.
PF_INLINE float reduce_sum(Vec x) {
    const __m256 a = fold_sum(x);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
PF_INLINE float reduce_max(Vec x) {
    const __m256 a = fold_max(x);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

// The two bfloat16 numbers of each 32-bit lane.
PF_INLINE Vec pair_first(VecI pairs) { return as_float(shift_left<16>(pairs)); }
PF_INLINE Vec pair_second(VecI pairs) { return as_float(and_int(pairs, set1_int(0xffff0000u))); }

// 2^x for x <= 127. Exactly 1 at 0, exactly 0 below -126 and for NaN. Error below 1.5 ulp.
PF_INLINE Vec exp2_or_zero(Vec x) {
    const Vec n = round(x);
    const Vec r = sub(x, n);
    Vec p = set1(0.00015476308f);
    p = fma(p, r, set1(0.0013400263f));
    p = fma(p, r, set1(0.009618004f));
    p = fma(p, r, set1(0.05550328f));
    p = fma(p, r, set1(0.2402265f));
    p = fma(p, r, set1(0.6931472f));
    p = fma(p, r, set1(1.0f));
    return keep(greater_equal(x, set1(-126.0f)), scale_by_power(p, n));
}

// e^x, with x clamped to what float32 can hold. Error below 1.5 ulp.
PF_INLINE Vec exp(Vec x) {
    x = min(max(x, set1(-87.3f)), set1(88.3f));
    const Vec n = round(mul(x, set1(1.44269504f)));
    const Vec r = fnma(n, set1(-2.12194440e-4f), fnma(n, set1(0.693359375f), x));
    Vec p = set1(0.0013950508f);
    p = fma(p, r, set1(0.008368902f));
    p = fma(p, r, set1(0.041666206f));
    p = fma(p, r, set1(0.16666518f));
    p = fma(p, r, set1(0.5f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    return scale_by_power(p, n);
}

// ln x for normal x > 0. Error below 2 ulp, near 1 too.
PF_INLINE Vec log(Vec x) {
    // x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)).
    const VecI half = set1_int(0x3f3504f3u);
    const VecI offset = sub_int(as_int(x), half);
    const Vec e = to_float(shift_right_signed<23>(offset));
    const Vec f = sub(as_float(add_int(and_int(offset, set1_int(0x007fffffu)), half)), set1(1.0f));
    Vec p = set1(0.06747733f);
    p = fma(p, f, set1(-0.11677521f));
    p = fma(p, f, set1(0.118886985f));
    p = fma(p, f, set1(-0.1240534f));
    p = fma(p, f, set1(0.14219452f));
    p = fma(p, f, set1(-0.16668005f));
    p = fma(p, f, set1(0.20002124f));
    p = fma(p, f, set1(-0.2500001f));
    p = fma(p, f, set1(0.33333313f));
    const Vec f2 = mul(f, f);
    p = mul(mul(p, f), f2);
    p = fma(e, set1(-2.12194440e-4f), p);
    p = fnma(set1(0.5f), f2, p);
    return fma(e, set1(0.693359375f), add(f, p));
}

}  // namespace pf::PF_ISA
