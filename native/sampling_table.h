// Token choice over a part of the vocabulary, compiled once per instruction set and chosen at run time.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace pf {

// One row of logits and the key of its noise (kernels.h: noise_argmax).
struct SamplingRow {
    const float* logits;
    int vocab;
    float inv_temperature;  // 0: greedy, without noise; the rest is then unused
    std::uint32_t seed_low, seed_high, position, sample_index;
};

struct Choice {
    float score;
    std::int32_t token;
};

// Tokens are processed in blocks that start at multiples of this.
inline constexpr int kSamplingBlock = 64;

struct SamplingTable {
    // Best score and its lowest token among [begin, end); begin is a multiple of kSamplingBlock. NaN counts as -inf.
    Choice (*best)(const SamplingRow& row, int begin, int end);
    // The score of one token, bit for bit what `best` compares.
    float (*score)(const SamplingRow& row, int token);
};

namespace avx2 {
extern const SamplingTable sampling_table;
}
namespace avx512 {
extern const SamplingTable sampling_table;
}

}  // namespace pf
