// Token choice of one instruction set. The generator is Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011).
#include "sampling_table.h"
#include "simd.h"

namespace pf::PF_ISA {
namespace {

constexpr int kVectors = kSamplingBlock / kWidth;
constexpr int kBatch = 4 * kWidth;  // tokens that one vector of counters gives noise to
constexpr float kNegativeInfinity = -__builtin_inff();

// No gumbel exceeds -log(2^-33) = 22.874.
constexpr float kGumbelBound = 23.0f;

// Random words of kBatch tokens from `token` on, in token order: words[i] belongs to tokens token + kWidth * i + lane.
PF_INLINE void philox(const SamplingRow& row, int token, VecI words[4]) {
    // Lane 4 l + i counts block (kWidth / 4) i + l, so that the 4x4 transposition at the end yields token order.
    constexpr std::uint32_t s = kWidth / 4;
    alignas(64) static constexpr std::uint32_t kOffsets[16] = {0,     s,         2 * s,     3 * s,     1,     s + 1,
                                                               2 * s + 1, 3 * s + 1, 2,     s + 2,     2 * s + 2,
                                                               3 * s + 2, 3,     s + 3,     2 * s + 3, 3 * s + 3};
    VecI c0 = add_int(set1_int(static_cast<std::uint32_t>(token) >> 2), load_int(kOffsets));
    VecI c1 = set1_int(row.position), c2 = set1_int(0), c3 = set1_int(row.sample_index);
    std::uint32_t k0 = row.seed_low, k1 = row.seed_high;
    const VecI m0 = set1_int(0xD2511F53u), m1 = set1_int(0xCD9E8D57u);
    for (int round = 0; round < 10; ++round) {
        VecI high0, low0, high1, low1;
        multiply_high_low(c0, m0, high0, low0);
        multiply_high_low(c2, m1, high1, low1);
        c0 = xor_int(xor_int(high1, c1), set1_int(k0));
        c2 = xor_int(xor_int(high0, c3), set1_int(k1));
        c1 = low1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const VecI a = unpack_low32(c0, c1), b = unpack_high32(c0, c1);
    const VecI c = unpack_low32(c2, c3), d = unpack_high32(c2, c3);
    words[0] = unpack_low64(a, c);
    words[1] = unpack_high64(a, c);
    words[2] = unpack_low64(b, d);
    words[3] = unpack_high64(b, d);
}

// Words to gumbels: v = min(x 2^-32 + 2^-33, 1 - 2^-24), -log(-log1p(-v)).
PF_INLINE Vec gumbel(VecI words) {
    // The halves are exact in float32, so the sum is rounded once, as a conversion of the unsigned word would be.
    const Vec high = to_float(shift_right<16>(words)), low = to_float(and_int(words, set1_int(0xffffu)));
    const Vec x = fma(high, set1(65536.0f), low);
    const Vec v = min(add(mul(x, set1(0x1p-32f)), set1(0x1p-33f)), set1(1.0f - 0x1p-24f));
    // log1p(-v) = log(w) v / (1 - w) with w = 1 - v as rounded: the quotient takes back that rounding.
    const Vec w = sub(set1(1.0f), v);
    const Vec lost = sub(set1(1.0f), w);
    const Vec minus_log = mul(sub(zero(), log(w)), div(v, lost));
    const Vec exponential = select(greater(lost, zero()), minus_log, v);
    return sub(zero(), log(exponential));
}

PF_INLINE void load_logits(const SamplingRow& row, int token, Vec logits[kVectors]) {
    PF_UNROLL
    for (int i = 0; i < kVectors; ++i) {
        const int left = row.vocab - token - i * kWidth;
        const float* p = row.logits + token + i * kWidth;
        if (left >= kWidth) {
            logits[i] = load(p);
        } else {
            const int n = left > 0 ? left : 0;
            logits[i] = n > 0 ? select(first_lanes(n), load_first(p, n), set1(kNegativeInfinity))
                              : set1(kNegativeInfinity);
        }
    }
}

// Adds the noise to kSamplingBlock scaled logits.
PF_INLINE void add_noise(const SamplingRow& row, int token, Vec scores[kVectors]) {
    PF_UNROLL
    for (int first = 0; first < kVectors; first += 4) {
        VecI words[4];
        philox(row, token + first * kWidth, words);
        PF_UNROLL
        for (int i = 0; i < 4; ++i) scores[first + i] = add(scores[first + i], gumbel(words[i]));
    }
}

// The best of each lane; a lane keeps its first, and so its lowest, token among equals.
struct Best {
    Vec score;
    VecI token;

    void take(const Vec scores[kVectors], int first_token) {
        const VecI lanes = load_int(kLanes);
        PF_UNROLL
        for (int i = 0; i < kVectors; ++i) {
            const Mask better = greater(scores[i], score);
            const auto base = static_cast<std::uint32_t>(first_token + i * kWidth);
            score = select(better, scores[i], score);
            token = select(better, add_int(set1_int(base), lanes), token);
        }
    }

    Choice reduce() const {
        alignas(64) float scores[kWidth];
        alignas(64) std::int32_t tokens[kWidth];
        store(scores, score);
        store_int(tokens, token);
        Choice best{scores[0], tokens[0]};
        for (int i = 1; i < kWidth; ++i) {
            const bool better = scores[i] > best.score || (scores[i] == best.score && tokens[i] < best.token);
            if (better) best = {scores[i], tokens[i]};
        }
        return best;
    }

    alignas(64) static constexpr std::int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};

Choice best_logit(const SamplingRow& row, int begin, int end) {
    Best best{set1(kNegativeInfinity), set1_int(static_cast<std::uint32_t>(begin))};
    for (int token = begin; token < end; token += kSamplingBlock) {
        Vec scores[kVectors];
        load_logits(row, token, scores);
        best.take(scores, token);
    }
    return best.reduce();
}

Choice best_noisy(const SamplingRow& row, int begin, int end) {
    Best best{set1(kNegativeInfinity), set1_int(static_cast<std::uint32_t>(begin))};
    const Vec inv_temperature = set1(row.inv_temperature), bound = set1(kGumbelBound);
    float threshold = kNegativeInfinity;
    for (int token = begin; token < end; token += kSamplingBlock) {
        Vec scores[kVectors];
        load_logits(row, token, scores);
        Vec highest = set1(kNegativeInfinity);
        PF_UNROLL
        for (int i = 0; i < kVectors; ++i) {
            scores[i] = mul(scores[i], inv_temperature);
            highest = max(scores[i], highest);  // in this order NaN loses
        }
        // Most of a vocabulary cannot win whatever its noise is.
        if (!any(greater_equal(add(highest, bound), set1(threshold)))) continue;
        add_noise(row, token, scores);
        best.take(scores, token);
        threshold = reduce_max(best.score);
    }
    return best.reduce();
}

Choice best(const SamplingRow& row, int begin, int end) {
    return row.inv_temperature == 0.0f ? best_logit(row, begin, end) : best_noisy(row, begin, end);
}

float score(const SamplingRow& row, int token) {
    Vec scores[kVectors];
    const int first = token / kSamplingBlock * kSamplingBlock;
    load_logits(row, first, scores);
    if (row.inv_temperature != 0.0f) {
        PF_UNROLL
        for (int i = 0; i < kVectors; ++i) scores[i] = mul(scores[i], set1(row.inv_temperature));
        add_noise(row, first, scores);
    }
    alignas(64) float values[kSamplingBlock];
    PF_UNROLL
    for (int i = 0; i < kVectors; ++i) store(values + i * kWidth, scores[i]);
    const float value = values[token - first];
    return value == value ? value : kNegativeInfinity;
}

}  // namespace

const SamplingTable sampling_table{best, score};

}  // namespace pf::PF_ISA
