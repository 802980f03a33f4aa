// Inside of the linear kernels: what linear.cpp hands to the code of one instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace pf {

inline constexpr std::int64_t kUnit = 32;    // output columns of one packed unit: the grain of work for threads
inline constexpr std::int64_t kKBlock = 32;  // inputs of one packed block of bf16 weights
inline constexpr int kLine = 64;             // bytes of a cache line

// How far ahead of its use a stream of weights is fetched while every weight is used for one block of rows: enough to
// cover the memory's latency at a core's share of its bandwidth.
inline constexpr std::int64_t kPrefetchBytes = 8192;

inline std::int64_t num_units(const PackedLinear& w) { return (w.n + kUnit - 1) / kUnit; }
inline std::int64_t num_k_blocks(const PackedLinear& w) { return (w.k + kKBlock - 1) / kKBlock; }

// Bytes of one packed unit of 32 output columns.
inline std::int64_t unit_bytes(const PackedLinear& w) {
    return w.dtype == DType::f32 ? w.k * kUnit * 4 : num_k_blocks(w) * kKBlock * kUnit * 2;
}

// One thread's share: columns of the units [unit_begin, unit_end) for all rows.
struct LinearShare {
    std::int64_t rows;
    const void* x;
    std::int64_t x_stride;
    const PackedLinear& w;
    void* y;
    std::int64_t y_stride;
    DType y_dtype;
    std::int64_t unit_begin, unit_end;
};

// Asks for the first bytes of this thread's share of the weights, so that they are on their way when its turn comes.
void prefetch_linear(const Ctx&, const PackedLinear& w);

namespace avx2 {
void linear_f32(const LinearShare&);
void linear_bf16(const LinearShare&);
}  // namespace avx2
namespace avx512 {
void linear_f32(const LinearShare&);
void linear_bf16(const LinearShare&);
}  // namespace avx512
namespace avx512_bf16 {
void linear_bf16(const LinearShare&);
}  // namespace avx512_bf16
namespace amx {
void linear_bf16(const LinearShare&);
}  // namespace amx

}  // namespace pf
