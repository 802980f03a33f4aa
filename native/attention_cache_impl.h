// Rotary embedding (Su et al., "RoFormer") and the writing of K and V into pages, for one instruction set.
#pragma once

#include "attention_table.h"
#include "simd.h"
#include "split.h"

namespace pf::PF_ISA {
namespace {

// Rotates dimension i of the first half of a head with dimension i of the second half.
template <class T>
PF_INLINE void rotate(T* head, int head_dim, const float* cos, const float* sin) {
    const int half = head_dim / 2;
    int i = 0;
    for (; i + kWidth <= half; i += kWidth) {
        const Vec a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, fms(a, c, mul(b, s)));
        store(head + half + i, fma(b, c, mul(a, s)));
    }
    if (const int n = half - i; n > 0) {
        const Vec a = load_first(head + i, n), b = load_first(head + half + i, n);
        const Vec c = load_first(cos + i, n), s = load_first(sin + i, n);
        store_first(head + i, fms(a, c, mul(b, s)), n);
        store_first(head + half + i, fma(b, c, mul(a, s)), n);
    }
}

// group: [d_pad][16 tokens]
PF_INLINE void write_key(float* group, int token, const float* key, int head_dim) {
    for (int d = 0; d < head_dim; ++d) group[d * kGroup + token] = key[d];
}

// group: [d_pad / 2][16 tokens][2]
PF_INLINE void write_key(Bf16* group, int token, const Bf16* key, int head_dim) {
    Bf16* out = group + token * 2;
    int d = 0;
    for (; d + 2 <= head_dim; d += 2) std::memcpy(out + d * kGroup, key + d, 2 * sizeof(Bf16));
    if (d < head_dim) out[d * kGroup] = key[d];
}

// page: [page_size][d_pad]
PF_INLINE void write_value(float* page, int d_pad, int token, const float* value, int head_dim) {
    std::memcpy(page + token * d_pad, value, sizeof(float) * static_cast<std::size_t>(head_dim));
}

// page: [page_size / 2][d_pad][2]. The pair's other token may be another thread's, so only this token's halves are
// touched.
PF_INLINE void write_value(Bf16* page, int d_pad, int token, const Bf16* value, int head_dim) {
    Bf16* out = page + token / 2 * 2 * d_pad;
    const int odd = token % 2;
    int d = 0;
#if defined(__AVX512BW__)
    const __m512i by_16 = _mm512_set1_epi32(odd * 16);
    const __mmask32 halves = odd ? 0xAAAAAAAAu : 0x55555555u;
    for (; d + 16 <= head_dim; d += 16) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + d));
        _mm512_mask_storeu_epi16(out + d * 2, halves, _mm512_sllv_epi32(_mm512_cvtepu16_epi32(x), by_16));
    }
#endif
    for (; d < head_dim; ++d) out[d * 2 + odd] = value[d];
}

template <class T>
void append_rows(const Ctx& ctx, const Batch& batch, const KVLayer& kv, T* q, std::int64_t q_stride, T* k,
                 std::int64_t k_stride, const T* v, std::int64_t v_stride, const float* cos, const float* sin) {
    const int dim = kv.head_dim, heads = kv.num_q_heads + kv.num_kv_heads;
    const Range range = split(static_cast<std::int64_t>(batch.num_tokens) * heads, ctx);
    for (std::int64_t i = range.begin; i < range.end; ++i) {
        const std::int64_t token = i / heads;
        const int head = static_cast<int>(i % heads), kv_head = head - kv.num_q_heads;
        const std::int64_t angle = static_cast<std::int64_t>(batch.positions[token]) * (dim / 2);
        T* vector = kv_head < 0 ? q + token * q_stride + static_cast<std::int64_t>(head) * dim
                                : k + token * k_stride + static_cast<std::int64_t>(kv_head) * dim;
        if (cos) rotate(vector, dim, cos + angle, sin + angle);
        if (kv_head < 0) continue;
        const std::int64_t slot = batch.slots[token];
        const int offset = static_cast<int>(slot % kv.page_size);
        const std::int64_t page = (slot / kv.page_size * kv.num_kv_heads + kv_head) * kv.page_size * kv.d_pad;
        T* group = static_cast<T*>(kv.k) + page + static_cast<std::int64_t>(offset / kGroup) * kGroup * kv.d_pad;
        write_key(group, offset % kGroup, vector, dim);
        write_value(static_cast<T*>(kv.v) + page, kv.d_pad, offset,
                    v + token * v_stride + static_cast<std::int64_t>(kv_head) * dim, dim);
    }
}

void rope_append(const Ctx& ctx, const Batch& batch, const KVLayer& kv, void* q, std::int64_t q_stride, void* k,
                 std::int64_t k_stride, const void* v, std::int64_t v_stride, const float* cos, const float* sin) {
    if (kv.dtype == DType::f32) {
        append_rows(ctx, batch, kv, static_cast<float*>(q), q_stride, static_cast<float*>(k), k_stride,
                    static_cast<const float*>(v), v_stride, cos, sin);
    } else {
        append_rows(ctx, batch, kv, static_cast<Bf16*>(q), q_stride, static_cast<Bf16*>(k), k_stride,
                    static_cast<const Bf16*>(v), v_stride, cos, sin);
    }
}

}  // namespace

const CacheTable cache_table{rope_append};

}  // namespace pf::PF_ISA
