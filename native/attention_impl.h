// The walk over a block's chunks, softmax and merge, in the vectors of one instruction set. The two matrix products
// come from a Math:
//
//   T, Q, W              types of the cache, of packed queries and of softmax weights
//   Math(rows)           an object lives while a block is worked on, whose tiles have up to so many rows
//   pack(q, dim, d_pad, out)                           one query, zero padded
//   scores(q, rows, d_pad, k, groups, out)             out[row][token] = q . K^T, summed over the head dim in order
//   store_weights(out, weights)                        one vector, rounded to what the product with V uses
//   values(weights, rows, d_pad, v, groups, out)       out[row][dim], summed over the tokens in order
//
// k and v point to the groups of 16 tokens, each laid out as Chunk says.
#pragma once

#include "attention_table.h"
#include "simd.h"

namespace pf::PF_ISA {
namespace {

constexpr float kNegativeInfinity = -__builtin_inff();
constexpr float kLog2E = 1.44269504f;

PF_INLINE int smaller(int a, int b) { return a < b ? a : b; }
PF_INLINE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// Where the groups of a chunk lie.
template <class T>
struct Chunk {
    const T* k[kChunkGroups];  // [d_pad / 2][16 tokens][2] or, in float32, [d_pad][16 tokens]
    const T* v[kChunkGroups];  // [8][d_pad][2] or [16][d_pad]
    int first_token;
};

// One query of bfloat16, zero padded. (A memcpy of this size becomes a slow string instruction.)
PF_INLINE void pack_bf16(const Bf16* q, int dim, int d_pad, Bf16* out) {
    int d = 0;
    for (; d + kGroup <= dim; d += kGroup) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + d)));
    }
    for (; d < d_pad; ++d) out[d] = d < dim ? q[d] : Bf16{};
}

// The group's tokens [begin, end), zeros in place of the others. A slot before a sequence's first key, or behind its
// last one, holds whatever was there before: its weight is 0, but 0 times NaN is NaN.
template <class T>
const T* clean_values(const T* group, int d_pad, int begin, int end, T* buffer) {
    constexpr int kPair = sizeof(T) == 2 ? 2 : 1;
    std::memcpy(buffer, group, sizeof(T) * static_cast<std::size_t>(kGroup * d_pad));
    for (int t = 0; t < kGroup; ++t) {
        if (t >= begin && t < end) continue;
        T* row = buffer + t / kPair * d_pad * kPair + t % kPair;
        for (int d = 0; d < d_pad; ++d) row[d * kPair] = T{};
    }
    return buffer;
}

template <class T>
Chunk<T> find_chunk(const AttentionCall& call, const RowBlock& block, int index, T* clean) {
    const KVLayer& kv = call.kv;
    const std::int32_t* pages = call.batch.pages + call.batch.page_start[block.seq];
    const int kv_len = call.batch.kv_len[block.seq];
    Chunk<T> chunk;
    chunk.first_token = index * kChunk;
    const int end = smaller(block.kv_end, chunk.first_token + kChunk);
    for (int g = 0, token = chunk.first_token; token < end; ++g, token += kGroup) {
        const std::int64_t page = pages[token / kv.page_size];
        const std::int64_t at = (page * kv.num_kv_heads + block.kv_head) * kv.page_size + token % kv.page_size;
        chunk.k[g] = static_cast<const T*>(kv.k) + at * kv.d_pad;
        chunk.v[g] = static_cast<const T*>(kv.v) + at * kv.d_pad;
        const int first = token < kv.first_key ? kv.first_key - token : 0;
        const int last = smaller(kv_len - token, kGroup);
        if (first > 0 || last < kGroup) {
            T* buffer = first > 0 ? clean : clean + kGroup * kv.d_pad;
            chunk.v[g] = clean_values(chunk.v[g], kv.d_pad, first, last, buffer);
        }
    }
    return chunk;
}

// The tokens that a row sees: all before `all_before`, then those of its ancestor bits.
struct Visible {
    int all_before;
    int end;
    const std::uint64_t* bits;  // of tokens from all_before on, or null
    int words;

    // Bit i says that token + i is visible.
    std::uint32_t group(int token) const {
        constexpr std::uint32_t kAll = (1u << kGroup) - 1u;
        const int j = token - all_before;  // the group's first bit; negative where the group begins before the tail
        const std::uint32_t before = j < 0 ? kAll >> (kGroup - smaller(-j, kGroup)) : 0;
        if (!bits || j <= -kGroup) return before;
        const int first = j > 0 ? j : 0, word = first / 64, shift = first % 64;
        std::uint64_t tail = word < words ? bits[word] >> shift : 0;
        if (shift > 64 - kGroup && word + 1 < words) tail |= bits[word + 1] << (64 - shift);
        const int left = end - token;  // bits of tokens that are not there don't count
        const std::uint32_t there = left < kGroup ? (1u << left) - 1u : kAll;
        return before | (static_cast<std::uint32_t>(tail << (first - j)) & there & kAll);
    }
};

PF_INLINE Visible visible_to(const AttentionCall& call, const RowBlock& block, int row) {
    const Batch& batch = call.batch;
    const int query_start = batch.query_start[block.seq];
    const int kv_len = batch.kv_len[block.seq];
    const int prefix = kv_len - (batch.query_start[block.seq + 1] - query_start);
    const int token = row / (call.kv.num_q_heads / call.kv.num_kv_heads);
    if (!batch.tree_mask) return {prefix + token + 1, kv_len, nullptr, 0};
    const std::int64_t offset = static_cast<std::int64_t>(query_start + token) * batch.tree_words;
    return {prefix, kv_len, batch.tree_mask + offset, batch.tree_words};
}

// The greatest visible score of a row. Scores of hidden tokens become -inf, so that their weight is exactly 0.
PF_INLINE float mask_and_maximum(const Visible& visible, int first_token, int groups, float* scores) {
    constexpr int kVectors = kGroup / kWidth;
    const int clear = clamp((visible.all_before - first_token) / kGroup, 0, groups) * kGroup;
    Vec highest = set1(kNegativeInfinity), other = highest;
    int i = 0;
    for (; i + 2 * kWidth <= clear; i += 2 * kWidth) {
        highest = max(highest, load(scores + i));
        other = max(other, load(scores + i + kWidth));
    }
    if (i < clear) highest = max(highest, load(scores + i));
    for (int g = clear / kGroup; g < groups; ++g) {
        const std::uint32_t seen = visible.group(first_token + g * kGroup);
        for (int j = 0; j < kVectors; ++j) {
            float* at = scores + g * kGroup + j * kWidth;
            const Mask mask = bits_mask(seen >> (j * kWidth) & ((1u << kWidth) - 1u));
            const Vec x = select(mask, load(at), set1(kNegativeInfinity));
            highest = max(highest, x);
            store(at, x);
        }
    }
    return reduce_max(max(highest, other));
}

// Turns a row's scores into weights exp2(score * scale - maximum), in place to spare the cache; returns their sum.
// Where nothing is visible, -inf - -inf is NaN, whose exp2_or_zero is 0.
template <class Math>
PF_INLINE float weigh(float* scores, int groups, float scale, float maximum) {
    auto* weights = reinterpret_cast<typename Math::W*>(scores);
    const Vec factor = set1(scale), offset = set1(maximum);
    const auto weight = [&](int i) __attribute__((always_inline)) {
        return exp2_or_zero(fms(load(scores + i), factor, offset));
    };
    const int tokens = groups * kGroup;
    Vec even = zero(), odd = zero();  // two sums, because one would wait for its own last addition
    int i = 0;
    for (; i + 2 * kWidth <= tokens; i += 2 * kWidth) {
        const Vec a = weight(i), b = weight(i + kWidth);
        Math::store_weights(weights + i, a);
        Math::store_weights(weights + i + kWidth, b);
        even = add(even, a);
        odd = add(odd, b);
    }
    if (i < tokens) {
        const Vec a = weight(i);
        Math::store_weights(weights + i, a);
        even = add(even, a);
    }
    return reduce_sum(add(even, odd));
}

// Both sides are scaled to the common maximum. A side that saw nothing has maximum -inf, and factor 0.
void merge(const Partial& into, const Partial& from, int first_row, int num_rows, int d_pad) {
    alignas(64) float keep_into[kTileRows], keep_from[kTileRows];
    for (int i = 0; i < kTileRows; i += kWidth) {
        const int at = first_row + i;
        const Vec a = load(into.maximum + at), b = load(from.maximum + at);
        const Vec highest = max(a, b);
        const Vec fa = exp2_or_zero(sub(a, highest)), fb = exp2_or_zero(sub(b, highest));
        store(keep_into + i, fa);
        store(keep_from + i, fb);
        store(into.maximum + at, highest);
        store(into.sum + at, fma(load(from.sum + at), fb, mul(load(into.sum + at), fa)));
    }
    for (int r = 0; r < num_rows; ++r) {
        float* x = into.values + static_cast<std::int64_t>(first_row + r) * d_pad;
        const float* y = from.values + static_cast<std::int64_t>(first_row + r) * d_pad;
        const Vec fa = set1(keep_into[r]), fb = set1(keep_from[r]);
        for (int d = 0; d < d_pad; d += kWidth) store(x + d, fma(load(y + d), fb, mul(load(x + d), fa)));
    }
}

template <class T>
void finish(const AttentionCall& call, const RowBlock& block, const Partial& state, int first_row, int num_rows) {
    const KVLayer& kv = call.kv;
    const int group = kv.num_q_heads / kv.num_kv_heads;
    for (int r = first_row; r < first_row + num_rows; ++r) {
        const int row = block.first_row + r;
        const std::int64_t token = call.batch.query_start[block.seq] + row / group;
        T* out = static_cast<T*>(call.out) + token * call.out_stride +
                 static_cast<std::int64_t>(block.kv_head * group + row % group) * kv.head_dim;
        const float* values = state.values + static_cast<std::int64_t>(r) * kv.d_pad;
        const Vec inverse = set1(state.sum[r] > 0.0f ? 1.0f / state.sum[r] : 0.0f);
        int d = 0;
        for (; d + kWidth <= kv.head_dim; d += kWidth) store(out + d, mul(load(values + d), inverse));
        if (d < kv.head_dim) store_first(out + d, mul(load(values + d), inverse), kv.head_dim - d);
    }
}

template <class Math>
void pack_queries(const AttentionCall& call, const RowBlock& block, typename Math::Q* packed) {
    const KVLayer& kv = call.kv;
    const int group = kv.num_q_heads / kv.num_kv_heads;
    for (int r = 0; r < block.num_rows; ++r) {
        const int row = block.first_row + r;
        const std::int64_t token = call.batch.query_start[block.seq] + row / group;
        const auto* q = static_cast<const typename Math::T*>(call.q) + token * call.q_stride +
                        static_cast<std::int64_t>(block.kv_head * group + row % group) * kv.head_dim;
        Math::pack(q, kv.head_dim, kv.d_pad, packed + static_cast<std::int64_t>(r) * kv.d_pad);
    }
}

// The walk of one block: chunk by chunk, and tile by tile of its rows.
template <class Math>
class Walk {
    using T = typename Math::T;
    using W = typename Math::W;

  public:
    Walk(const AttentionCall& call, const RowBlock& block, const AttentionScratch& scratch)
        : call_(call), block_(block), scratch_(scratch) {
        for (int r = 0; r < block.num_rows; ++r) {
            visible_[r] = visible_to(call, block, block.first_row + r);
            const int end = visible_[r].bits ? visible_[r].end : visible_[r].all_before;
            int& tile_end = ends_[r / kTileRows];
            if (end > tile_end) tile_end = end;
        }
    }

    void run(int chunk_begin, int chunk_end) {
        Math math(smaller(block_.num_rows, kTileRows));
        const int d_pad = call_.kv.d_pad;
        for (int c = chunk_begin; c < chunk_end; ++c) {
            const Chunk<T> chunk = find_chunk(call_, block_, c, static_cast<T*>(scratch_.clean_values));
            const bool merges = chunk_begin == 0 && c > 0;
            const Partial out = merges             ? scratch_.fresh
                                : chunk_begin == 0 ? scratch_.running
                                                   : scratch_.partial(c - chunk_begin, d_pad);
            for (int first = 0; first < block_.num_rows; first += kTileRows) {
                const int rows = smaller(kTileRows, block_.num_rows - first);
                attend_tile(chunk, first, rows, out);
                if (merges) merge(scratch_.running, scratch_.fresh, first, rows, d_pad);
            }
        }
    }

  private:
    void attend_tile(const Chunk<T>& chunk, int first, int rows, const Partial& out) {
        const int d_pad = call_.kv.d_pad;
        // Up to the last token that any row of the tile sees.
        const int groups = clamp((ends_[first / kTileRows] - chunk.first_token + kGroup - 1) / kGroup, 0, kChunkGroups);
        const auto* q = static_cast<const typename Math::Q*>(scratch_.q) + static_cast<std::int64_t>(first) * d_pad;
        Math::scores(q, rows, d_pad, chunk.k, groups, scratch_.scores);
        // Hidden from all rows alike, so what a row's mask says about these tokens doesn't matter.
        for (int token = chunk.first_token; token < call_.kv.first_key; ++token) {
            float* score = scratch_.scores + token - chunk.first_token;
            for (int r = 0; r < rows; ++r) score[r * kScoreStride] = kNegativeInfinity;
        }
        // All maxima first, so that a row need not wait for its own to come out of the lanes.
        const float scale = call_.scale * kLog2E;
        for (int r = 0; r < rows; ++r) {
            out.maximum[first + r] = scale * mask_and_maximum(visible_[first + r], chunk.first_token, groups,
                                                              scratch_.scores + r * kScoreStride);
        }
        for (int r = 0; r < rows; ++r) {
            out.sum[first + r] = weigh<Math>(scratch_.scores + r * kScoreStride, groups, scale, out.maximum[first + r]);
        }
        const auto* weights = reinterpret_cast<const W*>(scratch_.scores);
        Math::values(weights, rows, d_pad, chunk.v, groups, out.values + static_cast<std::int64_t>(first) * d_pad);
    }

    const AttentionCall& call_;
    const RowBlock& block_;
    const AttentionScratch& scratch_;
    Visible visible_[kBlockRows];
    int ends_[kBlockRows / kTileRows] = {};
};

template <class Math>
void attend(const AttentionCall& call, const RowBlock& block, int chunk_begin, int chunk_end,
            const AttentionScratch& scratch) {
    pack_queries<Math>(call, block, static_cast<typename Math::Q*>(scratch.q));
    Walk<Math>(call, block, scratch).run(chunk_begin, chunk_end);
    if (chunk_begin > 0 || chunk_end < block.num_chunks) return;
    finish<typename Math::T>(call, block, scratch.running, 0, block.num_rows);
}

template <class Math>
constexpr AttentionTable table_of() {
    return {attend<Math>, merge, finish<typename Math::T>};
}

}  // namespace
}  // namespace pf::PF_ISA
