// The 512-bit vector type of the linear kernels. Included inside the namespace of each AVX-512 instruction set.

struct Zmm {
    using reg = __m512;
    static constexpr int kWidth = 16;

    static reg zero() { return _mm512_setzero_ps(); }
    static reg set1(float value) { return _mm512_set1_ps(value); }
    static reg load(const float* p) { return _mm512_load_ps(p); }
    static void store(float* p, reg v) { _mm512_store_ps(p, v); }
    static void storeu(float* p, reg v) { _mm512_storeu_ps(p, v); }
    static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
    static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }

    static __m512i load_pairs(const void* p) { return _mm512_load_si512(p); }
    static reg widen_even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
    static reg widen_odd(__m512i pairs) {
        return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }

    // 32 inputs of a row to float32, zeros after the first `count`.
    static void widen_block(const std::uint16_t* x, std::int64_t count, float* out) {
        const __mmask32 mask = count >= kKBlock ? 0xffffffffu : (1u << count) - 1u;
        const __m512i all = _mm512_maskz_loadu_epi16(mask, x);
        const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(all));
        const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(all, 1));
        store(out, _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
        store(out + 16, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
    }

    // Rounds to nearest even; a NaN stays one.
    static void store_bf16(std::uint16_t* p, reg v) {
#if defined(__AVX512BF16__)
        const __m256i packed = (__m256i)_mm512_cvtneps_pbh(v);
#else
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        const __m512i quiet = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
        const __m256i packed = _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
#endif
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
    }
};
