#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "linear.h"

namespace pf::avx512 {
namespace {

#include "linear_simd.h"
#include "linear_zmm.h"

constexpr int kMaxRows = 8;  // 16 sums, two weights, and the inputs as memory operands

}  // namespace

void linear_f32(const LinearShare& s) {
    for_each_block<kMaxRows>(s, [&](auto r, auto... args) { block_f32<Zmm, decltype(r)::value>(s, args...); });
}

void linear_bf16(const LinearShare& s) {
    for_each_block<kMaxRows>(s, [&](auto r, auto... args) { block_bf16_widened<Zmm, decltype(r)::value>(s, args...); });
}

}  // namespace pf::avx512
