#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "linear.h"

namespace pf::avx512 {
namespace {

#include "linear_simd.h"
#include "linear_zmm.h"

// 32 registers: 16 sums (4 rows by 4 units, 8 by 2), four weights, and the inputs as memory operands.
constexpr int kQuadRows = 4, kMaxRows = 8;

}  // namespace

void linear_f32(const LinearShare& s) {
    for_each_block<kQuadRows, kMaxRows>(s, [&](auto r, auto u, auto... args) {
        block_f32<Zmm, decltype(r)::value, decltype(u)::value>(s, args...);
    });
}

void linear_bf16(const LinearShare& s) {
    for_each_block<kQuadRows, kMaxRows>(s, [&](auto r, auto u, auto... args) {
        block_bf16_widened<Zmm, decltype(r)::value, decltype(u)::value>(s, args...);
    });
}

}  // namespace pf::avx512
