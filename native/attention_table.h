// Inside of attention: what attention.cpp hands to the code of one instruction set.
//
// The work is cut by sequence, kv head, block of rows and chunk. A row is a pair of query token and query head, so that
// a K or V page is read once for all query tokens and all heads of its group. A chunk is kChunk tokens, counted from
// the sequence's first one: softmax runs within a chunk, and a row's chunks are merged in ascending order whoever
// computed them. So a row's bits depend on its visible tokens alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace pf {

inline constexpr int kGroup = 16;            // tokens of K that lie together
inline constexpr int kChunk = 256;           // tokens of one softmax
inline constexpr int kChunkGroups = kChunk / kGroup;
inline constexpr int kTileRows = 16;         // rows that a kernel takes at once
inline constexpr int kBlockRows = 64;        // rows that share the work of finding and fetching a chunk
inline constexpr int kScoreStride = kChunk + 16;  // floats of a row of scores; off the powers of two for the cache

struct AttentionCall {
    const Batch& batch;
    const KVLayer& kv;
    const void* q;
    std::int64_t q_stride;
    void* out;
    std::int64_t out_stride;
    float scale;  // positive
};

// Rows [first_row, first_row + num_rows) of one sequence and kv head; row r is query token r / group, head r % group.
struct RowBlock {
    int seq, kv_head;
    int first_row, num_rows;
    int kv_end;  // tokens visible to any of its rows
    int num_chunks;
};

// Maxima, sums and weighted values of kBlockRows rows over one chunk, or over all chunks before some point.
// Weights are exp2(score - maximum), scores in units of log 2.
struct Partial {
    float* maximum;  // [kBlockRows]
    float* sum;      // [kBlockRows]
    float* values;   // [kBlockRows, d_pad]
};

// One thread's memory.
struct AttentionScratch {
    void* q;             // [kBlockRows, d_pad], as the instruction set wants it
    float* scores;       // [kTileRows, kScoreStride], then the weights, each row in its scores' place
    void* clean_values;  // two groups of V with zeros where a sequence has no values: its first group and its last
    Partial fresh;       // of the chunk in work
    Partial running;     // of the chunks 0, 1, ... so far
    float* partials;     // those of single chunks, for a block that another thread began

    Partial partial(int index, int d_pad) const { return partial_at(partials + index * partial_floats(d_pad)); }

    static std::int64_t partial_floats(int d_pad) { return static_cast<std::int64_t>(kBlockRows) * (d_pad + 2); }
    static Partial partial_at(float* p) { return {p, p + kBlockRows, p + 2 * kBlockRows}; }
};

struct AttentionTable {
    // Chunks [chunk_begin, chunk_end) of a block. From chunk 0 to the last one, the output is written; from chunk 0 to
    // an earlier one, the result stays in scratch.running; else each chunk's goes to scratch.partials.
    void (*attend)(const AttentionCall&, const RowBlock&, int chunk_begin, int chunk_end, const AttentionScratch&);
    // into = merge(into, from), for the rows of one tile.
    void (*merge)(const Partial& into, const Partial& from, int first_row, int num_rows, int d_pad);
    // Writes the output of the rows of one tile.
    void (*finish)(const AttentionCall&, const RowBlock&, const Partial& state, int first_row, int num_rows);
};

struct CacheTable {
    decltype(&pf::rope_append) rope_append;
};

namespace avx2 {
extern const AttentionTable attention_f32, attention_bf16;
extern const CacheTable cache_table;
}  // namespace avx2
namespace avx512 {
extern const AttentionTable attention_f32, attention_bf16;
extern const CacheTable cache_table;
}  // namespace avx512
namespace avx512_bf16 {
extern const AttentionTable attention_bf16;
}
namespace amx {
extern const AttentionTable attention_bf16;
}

}  // namespace pf
