// The share of a thread in a loop over independent items.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace pf {

struct Range {
    std::int64_t begin, end;
};

// Static, so that the translation units of different instruction sets keep their own copy.
static inline Range split(std::int64_t count, const Ctx& ctx) {
    return {count * ctx.tid / ctx.num_threads, count * (ctx.tid + 1) / ctx.num_threads};
}

}  // namespace pf
