// Attention over pages: the cut of the work, the same for every instruction set.

#include <algorithm>
#include <cstring>

#include "attention_table.h"
#include "split.h"
#include "team.h"

namespace pf {
namespace {

const AttentionTable* attention_table(Isa isa, DType dtype) {
    [[maybe_unused]] const bool f32 = dtype == DType::f32;
    switch (isa) {
#if defined(PF_HAVE_AMX)
        case Isa::amx: return f32 ? &avx512::attention_f32 : &amx::attention_bf16;
#endif
#if defined(PF_HAVE_AVX512_BF16)
        case Isa::avx512_bf16: return f32 ? &avx512::attention_f32 : &avx512_bf16::attention_bf16;
#endif
#if defined(PF_HAVE_AVX512)
        case Isa::avx512: return f32 ? &avx512::attention_f32 : &avx512::attention_bf16;
#endif
#if defined(PF_HAVE_AVX2)
        case Isa::avx2: return f32 ? &avx2::attention_f32 : &avx2::attention_bf16;
#endif
        default: return nullptr;  // no program can be made with an instruction set that supported_isas() lacks
    }
}

const CacheTable* cache_table(Isa isa) {
#if defined(PF_HAVE_AVX512)
    if (isa != Isa::avx2) return &avx512::cache_table;
#endif
#if defined(PF_HAVE_AVX2)
    if (isa == Isa::avx2) return &avx2::cache_table;
#endif
    return nullptr;
}

constexpr std::size_t kAlign = 64;

// A block that several threads share: which one, and which of its chunks this thread did.
struct Share {
    int block_index = -1;
    int chunk_begin = 0, chunk_end = 0;
    RowBlock block;
};

// What a thread tells the others.
struct Report {
    Share begun;      // from chunk 0 on, not to the end: the result is in `running`
    Share continued;  // begun by an earlier thread: one result a chunk is in `partials`
};

// Lays out one thread's memory; from a null base, its size.
struct ThreadMemory {
    Report* report;
    AttentionScratch scratch;
    std::size_t bytes;

    ThreadMemory(char* base, int d_pad, std::int64_t max_chunks) : bytes(0) {
        const auto take = [&](std::size_t size) {
            char* at = base ? base + bytes : nullptr;
            bytes += (size + kAlign - 1) / kAlign * kAlign;
            return at;
        };
        const auto floats = [&](std::int64_t count) {
            return reinterpret_cast<float*>(take(static_cast<std::size_t>(count) * sizeof(float)));
        };
        const auto partial = [&] {
            float* maximum = floats(kBlockRows);
            float* sum = floats(kBlockRows);
            return Partial{maximum, sum, floats(static_cast<std::int64_t>(kBlockRows) * d_pad)};
        };
        report = reinterpret_cast<Report*>(take(sizeof(Report)));
        scratch.q = floats(static_cast<std::int64_t>(kBlockRows) * d_pad);
        scratch.scores = floats(kTileRows * kScoreStride);
        scratch.clean_values = floats(static_cast<std::int64_t>(2 * kGroup) * d_pad);
        scratch.fresh = partial();
        scratch.running = partial();
        scratch.partials = floats(max_chunks * AttentionScratch::partial_floats(d_pad));
    }
};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Calls visit(block, groups, cost of a group of tokens) for all blocks, in an order that keeps K and V in the cache.
template <class Visit>
void for_each_block(const Batch& batch, const KVLayer& kv, Visit visit) {
    // Reading a group of K and V costs about as much as the arithmetic of this many rows.
    constexpr int kReadCost = 16;
    const int group = kv.num_q_heads / kv.num_kv_heads;
    for (int seq = 0; seq < batch.num_seqs; ++seq) {
        const int queries = batch.query_start[seq + 1] - batch.query_start[seq];
        const int kv_len = batch.kv_len[seq];
        for (int head = 0; head < kv.num_kv_heads; ++head) {
            for (int row = 0; row < queries * group; row += kBlockRows) {
                const int rows = std::min(kBlockRows, queries * group - row);
                const int last_token = (row + rows - 1) / group;
                const int end = batch.tree_mask ? kv_len : kv_len - queries + last_token + 1;
                visit(RowBlock{seq, head, row, rows, end, ceil_div(end, kChunk)}, ceil_div(end, kGroup),
                      kReadCost + rows);
            }
        }
    }
}

// The first chunk of a block that lies behind a share's border: `target` of the total cost, `before` of it spent.
int border(std::int64_t target, std::int64_t before, int groups, int group_cost, int num_chunks) {
    if (target <= before) return 0;
    if (target >= before + static_cast<std::int64_t>(groups) * group_cost) return num_chunks;
    const std::int64_t chunk_cost = static_cast<std::int64_t>(kChunkGroups) * group_cost;
    return static_cast<int>(std::min<std::int64_t>((target - before + chunk_cost / 2) / chunk_cost, num_chunks));
}

// This thread's share: a run of (block, chunk) pairs of about equal cost.
Report attend_share(const Ctx& ctx, const AttentionTable& kernels, const AttentionCall& call,
                    const AttentionScratch& scratch) {
    std::int64_t total = 0;
    for_each_block(call.batch, call.kv, [&](const RowBlock&, int groups, int group_cost) {
        total += static_cast<std::int64_t>(groups) * group_cost;
    });
    const auto [from, to] = split(total, ctx);
    Report report;
    std::int64_t before = 0;
    int index = 0;
    for_each_block(call.batch, call.kv, [&, from = from, to = to](const RowBlock& block, int groups, int group_cost) {
        const int begin = border(from, before, groups, group_cost, block.num_chunks);
        const int end = border(to, before, groups, group_cost, block.num_chunks);
        if (begin < end) {
            kernels.attend(call, block, begin, end, scratch);
            if (begin > 0) report.continued = {index, begin, end, block};
            else if (end < block.num_chunks) report.begun = {index, begin, end, block};
        }
        before += static_cast<std::int64_t>(groups) * group_cost;
        ++index;
    });
    return report;
}

// Completes the blocks that several threads shared, in ascending order of chunks; tiles of rows are dealt to threads.
template <class MemoryOf>
void merge_shares(const Ctx& ctx, const AttentionTable& kernels, const AttentionCall& call, MemoryOf memory_of) {
    const int d_pad = call.kv.d_pad;
    for (int owner = 0; owner + 1 < ctx.num_threads; ++owner) {
        const ThreadMemory memory = memory_of(owner);
        const Share& begun = memory.report->begun;
        if (begun.block_index < 0) continue;
        for (int row = 0; row < begun.block.num_rows; row += kTileRows) {
            if ((row / kTileRows + owner) % ctx.num_threads != ctx.tid) continue;
            const int rows = std::min(kTileRows, begun.block.num_rows - row);
            for (int other = owner + 1, done = begun.chunk_end; done < begun.block.num_chunks; ++other) {
                const ThreadMemory next = memory_of(other);
                const Share& share = next.report->continued;
                if (share.block_index != begun.block_index) continue;  // a thread without work
                for (int c = 0; c < share.chunk_end - share.chunk_begin; ++c) {
                    kernels.merge(memory.scratch.running, next.scratch.partial(c, d_pad), row, rows, d_pad);
                }
                done = share.chunk_end;
            }
            kernels.finish(call, begun.block, memory.scratch.running, row, rows);
        }
    }
}

}  // namespace

void attention(const Ctx& ctx, const Batch& batch, const KVLayer& kv, const void* q, std::int64_t q_stride, void* out,
               std::int64_t out_stride, float scale, void* scratch) {
    const AttentionTable& kernels = *attention_table(ctx.isa, kv.dtype);
    const AttentionCall call{batch, kv, q, q_stride, out, out_stride, scale};
    int longest = 0;
    for (int seq = 0; seq < batch.num_seqs; ++seq) longest = std::max(longest, batch.kv_len[seq]);
    const int max_chunks = ceil_div(longest, kChunk);
    const std::size_t bytes = ThreadMemory(nullptr, kv.d_pad, max_chunks).bytes;
    const auto memory_of = [&](int tid) {
        return ThreadMemory(static_cast<char*>(scratch) + static_cast<std::size_t>(tid) * bytes, kv.d_pad, max_chunks);
    };
    const ThreadMemory memory = memory_of(ctx.tid);
    *memory.report = attend_share(ctx, kernels, call, memory.scratch);
    if (ctx.num_threads == 1 || max_chunks <= 1) return;  // no block was shared
    ctx.barrier->wait();
    merge_shares(ctx, kernels, call, memory_of);
}

std::size_t attention_scratch_bytes(const KVLayer& kv, std::int64_t, std::int64_t, std::int64_t max_kv_len,
                                    int num_threads) {
    const std::int64_t max_chunks = (max_kv_len + kChunk - 1) / kChunk;
    return ThreadMemory(nullptr, kv.d_pad, max_chunks).bytes * static_cast<std::size_t>(num_threads);
}

void rope_append(const Ctx& ctx, const Batch& batch, const KVLayer& kv, void* q, std::int64_t q_stride, void* k,
                 std::int64_t k_stride, const void* v, std::int64_t v_stride, const float* cos, const float* sin) {
    cache_table(ctx.isa)->rope_append(ctx, batch, kv, q, q_stride, k, k_stride, v, v_stride, cos, sin);
}

void copy_slots(const Ctx& ctx, const KVLayer& kv, const std::int32_t* source, const std::int32_t* target,
                std::int64_t count) {
    // Threads take whole heads, so that each head's copies run in order: one's target may be a later one's source.
    const Range heads = split(kv.num_kv_heads, ctx);
    const std::int64_t size = static_cast<std::int64_t>(size_of(kv.dtype));
    const std::int64_t pair = kv.dtype == DType::bf16 ? 2 : 1;  // dims of K, and tokens of V, that lie together
    const auto offsets = [&](std::int64_t slot, std::int64_t head) {
        const std::int64_t token = slot % kv.page_size;
        const std::int64_t page = (slot / kv.page_size * kv.num_kv_heads + head) * kv.page_size * kv.d_pad;
        return std::pair{page + token / kGroup * kGroup * kv.d_pad + token % kGroup * pair,
                         page + token / pair * pair * kv.d_pad + token % pair};
    };
    for (std::int64_t head = heads.begin; head < heads.end; ++head) {
        for (std::int64_t i = 0; i < count; ++i) {
            const auto [k_from, v_from] = offsets(source[i], head);
            const auto [k_to, v_to] = offsets(target[i], head);
            char* k = static_cast<char*>(kv.k);
            char* v = static_cast<char*>(kv.v);
            for (std::int64_t d = 0; d < kv.d_pad; d += pair) {
                std::memmove(k + (k_to + d * kGroup) * size, k + (k_from + d * kGroup) * size,
                             static_cast<std::size_t>(pair * size));
            }
            for (std::int64_t d = 0; d < kv.d_pad; ++d) {
                std::memmove(v + (v_to + d * pair) * size, v + (v_from + d * pair) * size,
                             static_cast<std::size_t>(size));
            }
        }
    }
}

}  // namespace pf
