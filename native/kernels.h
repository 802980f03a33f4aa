// What every kernel of this extension shares: types, the context a kernel runs in, and the kernels' signatures.
//
// A kernel is called once by each thread of the team, all with the same arguments, and takes its own share of the work
// from (ctx.tid, ctx.num_threads). Rows are independent: an output row depends on its input row alone, and the order in
// which an output element is summed depends on the instruction set and the shapes of the weights, never on the number of
// rows, on the row's place among them, or on the number of threads. That is what makes speculation exact.
//
// Strides are counted in elements. "rows" is the number of tokens, the only size that varies between replays.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pf {

enum class Isa : int { avx2 = 0, avx512 = 1, avx512_bf16 = 2, amx = 3 };
enum class DType : int { f32 = 0, bf16 = 1 };

inline constexpr std::size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// All threads of a team meet here; spins, then yields. Defined in team.h.
class Barrier;

struct Ctx {
    Isa isa;
    int tid;
    int num_threads;
    Barrier* barrier;  // for kernels with more than one phase; every thread must call it equally often
    // Work that threads take as they go: num_threads when the kernel begins, thread t having taken number t.
    std::atomic<std::int64_t>* next_work;
};

// One forward pass's ragged batch (pilotfish.attention.ForwardBatch). The pointers stay valid while a program runs.
struct Batch {
    const std::int32_t* positions = nullptr;    // [T]
    const std::int32_t* slots = nullptr;        // [T]
    const std::int32_t* query_start = nullptr;  // [S + 1]
    const std::int32_t* kv_len = nullptr;       // [S]
    const std::int32_t* page_start = nullptr;   // [S + 1]
    const std::int32_t* pages = nullptr;        // [page_start[S]]
    const std::uint64_t* tree_mask = nullptr;   // [T, tree_words] or null for causal tails
    int tree_words = 0;
    int num_tokens = 0;
    int num_seqs = 0;
};

// ---------------------------------------------------------------------------------------------------------------
// linear.cpp. Weights [N, K] are packed by the caller's dtype:
//   bf16: [N/16][K/32][16 k-pairs][16 n][2], zero padded to multiples of 16 in N and 32 in K
//   f32:  [N/16][K][16], zero padded in N
struct PackedLinear {
    DType dtype;
    std::int64_t n, k;
    void* data;         // 64-byte aligned, huge pages where the system gives them
    const float* bias;  // [N] or null
};

// y = x W^T + bias. x has the weight's dtype; y has y_dtype.
void linear(const Ctx&, std::int64_t rows, const void* x, std::int64_t x_stride, const PackedLinear& w, void* y,
            std::int64_t y_stride, DType y_dtype);

// out[t] = W[token_ids[t]], read from the packed layout.
void embedding(const Ctx&, std::int64_t rows, const std::int32_t* token_ids, const PackedLinear& table, void* out,
               std::int64_t out_stride);

// ---------------------------------------------------------------------------------------------------------------
// elementwise.cpp. Arithmetic in float32, results rounded to dtype (nearest even).

// Each row holds `groups` contiguous vectors of `dim`; each is normed by itself. w: [dim] of dtype.
void rms_norm(const Ctx&, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride, const void* w, void* out,
              std::int64_t out_stride, int groups, int dim, float eps);

// residual += x (rounded to dtype), out = norm(residual).
void add_rms_norm(const Ctx&, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride, void* residual,
                  std::int64_t residual_stride, const void* w, void* out, std::int64_t out_stride, int dim, float eps);

// out = residual + x.
void add(const Ctx&, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride, const void* residual,
         std::int64_t residual_stride, void* out, std::int64_t out_stride, int dim);

// gate_up = [gate | up], out = silu(gate) * up; dim = length of out.
void silu_mul(const Ctx&, std::int64_t rows, DType dtype, const void* gate_up, std::int64_t gate_up_stride, void* out,
              std::int64_t out_stride, int dim);

void gather_rows(const Ctx&, std::int64_t rows, DType dtype, const void* x, std::int64_t x_stride,
                 const std::int32_t* index, void* out, std::int64_t out_stride, int dim);

// One of the tensors that concat puts side by side.
struct Columns {
    const void* x;
    std::int64_t stride;
    int dim;
};

// out = [parts[0] | parts[1] | ...].
void concat(const Ctx&, std::int64_t rows, DType dtype, const std::vector<Columns>& parts, void* out,
            std::int64_t out_stride);

// ---------------------------------------------------------------------------------------------------------------
// sampling.cpp. Logits are float32; ties go to the lowest token id.

void argmax(const Ctx&, std::int64_t rows, const float* logits, std::int64_t stride, int vocab, std::int32_t* out);

// argmax(logits * inv_temperature + gumbel); a row with inv_temperature 0 is greedy. Noise: Philox4x32-10 with
// counter (token_id >> 2, position, stream 0, sample_index) and key (low, high half of seed), word token_id & 3;
// v = min(x * 2^-32 + 2^-33, 1 - 2^-24) in float32, gumbel = -log(-log1p(-v)).
void noise_argmax(const Ctx&, std::int64_t rows, const float* logits, std::int64_t stride, int vocab,
                  const float* inv_temperature, const std::uint64_t* seeds, const std::int32_t* sample_indices,
                  const std::int32_t* positions, std::int32_t* out);

// ---------------------------------------------------------------------------------------------------------------
// attention.cpp. One layer's pages. Head dims are zero padded to d_pad = a multiple of 32.
//   bf16: K [page][Hkv][page_size/16][d_pad/2][16 tokens][2]   V [page][Hkv][page_size/2][d_pad][2]
//   f32:  K [page][Hkv][page_size/16][d_pad][16 tokens]        V [page][Hkv][page_size][d_pad]
struct KVLayer {
    DType dtype;
    int num_q_heads, num_kv_heads, head_dim, d_pad, page_size;
    void* k;
    void* v;
    int first_key = 0;  // tokens at the start of every sequence that no query attends to: 0 or 1
};

// Rotates q and k in place (cos, sin: float32 [positions, head_dim / 2]; null: no rotation), writes k and v to slots.
void rope_append(const Ctx&, const Batch&, const KVLayer&, void* q, std::int64_t q_stride, void* k,
                 std::int64_t k_stride, const void* v, std::int64_t v_stride, const float* cos, const float* sin);

// Scratch for attention, sized for the largest batch: see attention_scratch_bytes.
void attention(const Ctx&, const Batch&, const KVLayer&, const void* q, std::int64_t q_stride, void* out,
               std::int64_t out_stride, float scale, void* scratch);

std::size_t attention_scratch_bytes(const KVLayer&, std::int64_t max_tokens, std::int64_t max_seqs,
                                    std::int64_t max_kv_len, int num_threads);

// Copy K and V of one layer from slot to slot, in order (tree compaction).
void copy_slots(const Ctx&, const KVLayer&, const std::int32_t* source, const std::int32_t* target, std::int64_t count);

}  // namespace pf
