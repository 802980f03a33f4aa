#include <cstring>

#include "elementwise_table.h"
#include "split.h"

namespace pf {
namespace {

const ElementwiseTable& table(const Ctx& ctx) {
    const ElementwiseTable* kernels = nullptr;  // stays so only where supported_isas() is empty
#if defined(PF_HAVE_AVX2)
    if (ctx.isa == Isa::avx2) kernels = &avx2::elementwise_table;
#endif
#if defined(PF_HAVE_AVX512)
    if (ctx.isa != Isa::avx2) kernels = &avx512::elementwise_table;
#endif
    return *kernels;
}

}  // namespace

void rms_norm(const Ctx& ctx, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride, const void* w,
              void* out, std::int64_t out_stride, int groups, int dim, float eps) {
    table(ctx).rms_norm(ctx, rows, dtype, x, x_stride, w, out, out_stride, groups, dim, eps);
}

void add_rms_norm(const Ctx& ctx, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride, void* residual,
                  std::int64_t residual_stride, const void* w, void* out, std::int64_t out_stride, int dim,
                  float eps) {
    table(ctx).add_rms_norm(ctx, rows, dtype, x, x_stride, residual, residual_stride, w, out, out_stride, dim, eps);
}

void add(const Ctx& ctx, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride, const void* residual,
         std::int64_t residual_stride, void* out, std::int64_t out_stride, int dim) {
    table(ctx).add(ctx, rows, dtype, x, x_stride, residual, residual_stride, out, out_stride, dim);
}

void silu_mul(const Ctx& ctx, std::int64_t rows, DType dtype, const void* gate_up, std::int64_t gate_up_stride,
              void* out, std::int64_t out_stride, int dim) {
    table(ctx).silu_mul(ctx, rows, dtype, gate_up, gate_up_stride, out, out_stride, dim);
}

void gather_rows(const Ctx& ctx, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride,
                 const std::int32_t* index, void* out, std::int64_t out_stride, int dim) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    const Range range = split(rows, ctx);
    for (std::int64_t row = range.begin; row < range.end; ++row) {
        std::memcpy(static_cast<char*>(out) + row * out_stride * size,
                    static_cast<const char*>(x) + index[row] * x_stride * size, static_cast<std::size_t>(dim * size));
    }
}

void concat(const Ctx& ctx, std::int64_t rows, DType dtype, const std::vector<Columns>& parts, void* out,
            std::int64_t out_stride) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    const Range range = split(rows, ctx);
    for (std::int64_t row = range.begin; row < range.end; ++row) {
        char* to = static_cast<char*>(out) + row * out_stride * size;
        for (const Columns& part : parts) {
            const auto bytes = static_cast<std::size_t>(part.dim * size);
            std::memcpy(to, static_cast<const char*>(part.x) + row * part.stride * size, bytes);
            to += bytes;
        }
    }
}

}  // namespace pf
