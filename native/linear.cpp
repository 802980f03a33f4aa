// Linear layers and the embedding: sharing out the work, and choosing the instruction set's kernel.

#include "linear.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pf {
namespace {

using Kernel = void (*)(const LinearShare&);

Kernel kernel_for(Isa isa, DType dtype) {
    [[maybe_unused]] const bool f32 = dtype == DType::f32;
    switch (isa) {
#if defined(PF_HAVE_AMX)
        case Isa::amx: return f32 ? avx512::linear_f32 : amx::linear_bf16;
#endif
#if defined(PF_HAVE_AVX512_BF16)
        case Isa::avx512_bf16: return f32 ? avx512::linear_f32 : avx512_bf16::linear_bf16;
#endif
#if defined(PF_HAVE_AVX512)
        case Isa::avx512: return f32 ? avx512::linear_f32 : avx512::linear_bf16;
#endif
#if defined(PF_HAVE_AVX2)
        case Isa::avx2: return f32 ? avx2::linear_f32 : avx2::linear_bf16;
#endif
        default: return nullptr;  // no program can be made with an instruction set that supported_isas() lacks
    }
}

// Columns go to threads in whole units, inputs never: a sum is always one thread's, so bits don't depend on threads.
std::pair<std::int64_t, std::int64_t> share_of(const Ctx& ctx, std::int64_t total) {
    return {total * ctx.tid / ctx.num_threads, total * (ctx.tid + 1) / ctx.num_threads};
}

void embed_row(const PackedLinear& table, std::int64_t id, void* out) {
    const std::int64_t unit = id / kUnit, column = id % kUnit;
    const char* base = static_cast<const char*>(table.data) + unit * unit_bytes(table);
    if (table.dtype == DType::f32) {
        const float* source = reinterpret_cast<const float*>(base) + column;
        float* target = static_cast<float*>(out);
        for (std::int64_t k = 0; k < table.k; ++k) target[k] = source[k * kUnit];
        return;
    }
    // Pairs of inputs lie together: [K/32][2 tiles][16 pairs][16 columns][2].
    const char* source = base + (column / 16) * 1024 + (column % 16) * 4;
    char* target = static_cast<char*>(out);
    for (std::int64_t k = 0; k < table.k; k += 2) {
        const char* pair = source + (k / kKBlock) * 2048 + (k % kKBlock) / 2 * 64;
        std::memcpy(target + k * 2, pair, k + 1 < table.k ? 4 : 2);
    }
}

}  // namespace

void linear(const Ctx& ctx, std::int64_t rows, const void* x, std::int64_t x_stride, const PackedLinear& w, void* y,
            std::int64_t y_stride, DType y_dtype) {
    const auto [begin, end] = share_of(ctx, num_units(w));
    if (begin == end || rows == 0) return;
    kernel_for(ctx.isa, w.dtype)({rows, x, x_stride, w, y, y_stride, y_dtype, begin, end});
}

void prefetch_linear(const Ctx& ctx, const PackedLinear& w) {
    const auto [begin, end] = share_of(ctx, num_units(w));
    const char* data = static_cast<const char*>(w.data) + begin * unit_bytes(w);
    const std::int64_t bytes = std::min((end - begin) * unit_bytes(w), 2 * kPrefetchBytes);
    for (std::int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(data + i, 0, 2);
}

void embedding(const Ctx& ctx, std::int64_t rows, const std::int32_t* token_ids, const PackedLinear& table, void* out,
               std::int64_t out_stride) {
    const auto [begin, end] = share_of(ctx, rows);
    const std::int64_t row_bytes = out_stride * static_cast<std::int64_t>(size_of(table.dtype));
    for (std::int64_t t = begin; t < end; ++t) {
        // An id outside the table would read wild memory; the engine refuses it long before, this is the last line.
        const std::int64_t id = std::clamp<std::int64_t>(token_ids[t], 0, table.n - 1);
        embed_row(table, id, static_cast<char*>(out) + t * row_bytes);
    }
}

}  // namespace pf
