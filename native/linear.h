// Inside of the linear kernels: what linear.cpp hands to the code of one instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace pf {

inline constexpr std::int64_t kUnit = 16;    // output columns of one packed unit: the grain of work for threads
inline constexpr std::int64_t kKBlock = 32;  // inputs of one packed block of bf16 weights
inline constexpr int kLine = 64;             // bytes of a cache line

// How far ahead of its use a stream of weights is fetched while every weight is used for one block of rows. Four units
// are read side by side where registers allow: four streams of memory come a fifth faster than two, and two faster than
// one, because the core's own prefetchers follow each.
inline constexpr std::int64_t kPrefetchBytes = 2048;

inline std::int64_t num_units(const PackedLinear& w) { return (w.n + kUnit - 1) / kUnit; }
inline std::int64_t num_k_blocks(const PackedLinear& w) { return (w.k + kKBlock - 1) / kKBlock; }

// Bytes of one packed unit.
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
    const char* next;  // weights that this thread will read after these; what it has read already if there are none
};

// Fetches the weights that a thread will read first, in small portions, while it waits for the threads before it.
class LinearPrefetch {
  public:
    LinearPrefetch(const Ctx&, std::int64_t rows, const PackedLinear& w);

    // Asks for a few cache lines more, until the portion that fits the cache beside everything else is on its way.
    void some();

  private:
    const char* first_;
    std::int64_t num_units_, unit_bytes_;
    std::int64_t done_ = 0;
};

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
