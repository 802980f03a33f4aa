// The row-wise kernels of one instruction set: see kernels.h for what they compute.
#include "elementwise_table.h"
#include "simd.h"
#include "split.h"

namespace pf::PF_ISA {
namespace {

// Calls body(i, n) for each vector of n lanes at i: n is kWidth but for the last one.
template <class Body>
PF_INLINE void for_each_vector(int dim, Body body) {
    int i = 0;
    for (; i + kWidth <= dim; i += kWidth) body(i, kWidth);
    if (i < dim) body(i, dim - i);
}

template <class T>
PF_INLINE Vec load_up_to(const T* p, int n) {
    return n == kWidth ? load(p) : load_first(p, n);
}
template <class T>
PF_INLINE void store_up_to(T* p, Vec x, int n) {
    n == kWidth ? store(p, x) : store_first(p, x, n);
}

template <class T>
PF_INLINE void scale_row(const T* x, const T* w, T* out, int dim, Vec squares, float eps) {
    const float mean = reduce_sum(squares) / static_cast<float>(dim);
    const Vec scale = div(set1(1.0f), sqrt(set1(mean + eps)));
    for_each_vector(dim, [&](int i, int n) {
        store_up_to(out + i, mul(mul(load_up_to(x + i, n), scale), load_up_to(w + i, n)), n);
    });
}

template <class T>
void rms_norm_rows(const Ctx& ctx, std::int64_t rows, const void* x, std::int64_t x_stride, const void* w, void* out,
                   std::int64_t out_stride, int groups, int dim, float eps) {
    const Range range = split(rows * groups, ctx);
    for (std::int64_t r = range.begin; r < range.end; ++r) {
        const std::int64_t row = r / groups, group = r % groups;
        const T* in = static_cast<const T*>(x) + row * x_stride + group * dim;
        Vec squares = zero();
        for_each_vector(dim, [&](int i, int n) {
            const Vec v = load_up_to(in + i, n);
            squares = fma(v, v, squares);
        });
        T* result = static_cast<T*>(out) + row * out_stride + group * dim;
        scale_row(in, static_cast<const T*>(w), result, dim, squares, eps);
    }
}

template <class T>
void add_rms_norm_rows(const Ctx& ctx, std::int64_t rows, const void* x, std::int64_t x_stride, void* residual,
                       std::int64_t residual_stride, const void* w, void* out, std::int64_t out_stride, int dim,
                       float eps) {
    const Range range = split(rows, ctx);
    for (std::int64_t row = range.begin; row < range.end; ++row) {
        const T* in = static_cast<const T*>(x) + row * x_stride;
        T* sum = static_cast<T*>(residual) + row * residual_stride;
        Vec squares = zero();
        for_each_vector(dim, [&](int i, int n) {
            store_up_to(sum + i, add(load_up_to(sum + i, n), load_up_to(in + i, n)), n);
            const Vec v = load_up_to(sum + i, n);  // as rounded, so that the norm is that of the stored residual
            squares = fma(v, v, squares);
        });
        scale_row(sum, static_cast<const T*>(w), static_cast<T*>(out) + row * out_stride, dim, squares, eps);
    }
}

template <class T>
void add_rows(const Ctx& ctx, std::int64_t rows, const void* x, std::int64_t x_stride, const void* residual,
              std::int64_t residual_stride, void* out, std::int64_t out_stride, int dim) {
    const Range range = split(rows, ctx);
    for (std::int64_t row = range.begin; row < range.end; ++row) {
        const T* a = static_cast<const T*>(residual) + row * residual_stride;
        const T* b = static_cast<const T*>(x) + row * x_stride;
        T* sum = static_cast<T*>(out) + row * out_stride;
        for_each_vector(dim, [&](int i, int n) {
            store_up_to(sum + i, add(load_up_to(a + i, n), load_up_to(b + i, n)), n);
        });
    }
}

template <class T>
void silu_mul_rows(const Ctx& ctx, std::int64_t rows, const void* gate_up, std::int64_t stride, void* out,
                   std::int64_t out_stride, int dim) {
    // One row is worth sharing too: the unit of work is a block of a row.
    constexpr int kBlock = 128;
    const std::int64_t blocks = (dim + kBlock - 1) / kBlock;
    const Range range = split(rows * blocks, ctx);
    for (std::int64_t b = range.begin; b < range.end; ++b) {
        const std::int64_t row = b / blocks;
        const int start = static_cast<int>(b % blocks) * kBlock;
        const T* gate = static_cast<const T*>(gate_up) + row * stride + start;
        T* result = static_cast<T*>(out) + row * out_stride + start;
        for_each_vector(dim - start < kBlock ? dim - start : kBlock, [&](int i, int n) {
            const Vec g = load_up_to(gate + i, n);
            const Vec silu = div(g, add(set1(1.0f), exp(sub(zero(), g))));
            store_up_to(result + i, mul(silu, load_up_to(gate + dim + i, n)), n);
        });
    }
}

void rms_norm(const Ctx& ctx, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride, const void* w,
              void* out, std::int64_t out_stride, int groups, int dim, float eps) {
    const auto kernel = dtype == DType::f32 ? rms_norm_rows<float> : rms_norm_rows<Bf16>;
    kernel(ctx, rows, x, x_stride, w, out, out_stride, groups, dim, eps);
}

void add_rms_norm(const Ctx& ctx, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride, void* residual,
                  std::int64_t residual_stride, const void* w, void* out, std::int64_t out_stride, int dim,
                  float eps) {
    const auto kernel = dtype == DType::f32 ? add_rms_norm_rows<float> : add_rms_norm_rows<Bf16>;
    kernel(ctx, rows, x, x_stride, residual, residual_stride, w, out, out_stride, dim, eps);
}

void add(const Ctx& ctx, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride, const void* residual,
         std::int64_t residual_stride, void* out, std::int64_t out_stride, int dim) {
    const auto kernel = dtype == DType::f32 ? add_rows<float> : add_rows<Bf16>;
    kernel(ctx, rows, x, x_stride, residual, residual_stride, out, out_stride, dim);
}

void silu_mul(const Ctx& ctx, std::int64_t rows, DType dtype, const void* gate_up, std::int64_t gate_up_stride,
              void* out, std::int64_t out_stride, int dim) {
    const auto kernel = dtype == DType::f32 ? silu_mul_rows<float> : silu_mul_rows<Bf16>;
    kernel(ctx, rows, gate_up, gate_up_stride, out, out_stride, dim);
}

}  // namespace

const ElementwiseTable elementwise_table{rms_norm, add_rms_norm, add, silu_mul};

}  // namespace pf::PF_ISA
