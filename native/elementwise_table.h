// The row-wise kernels, compiled once per instruction set and chosen at run time.
#pragma once

#include "kernels.h"

namespace pf {

struct ElementwiseTable {
    decltype(&pf::rms_norm) rms_norm;
    decltype(&pf::add_rms_norm) add_rms_norm;
    decltype(&pf::add) add;
    decltype(&pf::silu_mul) silu_mul;
};

namespace avx2 {
extern const ElementwiseTable elementwise_table;
}
namespace avx512 {
extern const ElementwiseTable elementwise_table;
}

}  // namespace pf
