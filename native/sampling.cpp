#include <atomic>

#include "sampling_table.h"
#include "split.h"
#include "team.h"

namespace pf {
namespace {

const SamplingTable& table(const Ctx& ctx) {
    const SamplingTable* kernels = nullptr;  // stays so only where supported_isas() is empty
#if defined(PF_HAVE_AVX2)
    if (ctx.isa == Isa::avx2) kernels = &avx2::sampling_table;
#endif
#if defined(PF_HAVE_AVX512)
    if (ctx.isa != Isa::avx2) kernels = &avx512::sampling_table;
#endif
    return *kernels;
}

// Offers a choice for a row that other threads work on too. The row keeps the best score and, among equals, the lowest
// token: a maximum, so the order of the offers does not matter.
void offer(const SamplingTable& kernels, const SamplingRow& row, Choice choice, std::int32_t& out) {
    const std::atomic_ref<std::int32_t> shared(out);
    std::int32_t token = shared.load(std::memory_order_relaxed);
    for (;;) {
        if (token >= 0) {
            const float score = kernels.score(row, token);
            if (score > choice.score || (score == choice.score && token <= choice.token)) return;
        }
        if (shared.compare_exchange_weak(token, choice.token, std::memory_order_relaxed)) return;
    }
}

// Splits rows x vocabulary over the threads. `row_of` gives a row's SamplingRow.
template <class RowOf>
void choose(const Ctx& ctx, std::int64_t rows, int vocab, std::int32_t* out, RowOf row_of) {
    constexpr int kSegment = 16 * kSamplingBlock;
    const SamplingTable& kernels = table(ctx);
    const std::int64_t segments = (vocab + kSegment - 1) / kSegment;
    const Range range = split(rows * segments, ctx);
    if (ctx.tid == 0) {
        for (std::int64_t row = 0; row < rows; ++row) out[row] = -1;
    }
    ctx.barrier->wait();
    for (std::int64_t at = range.begin; at < range.end;) {
        const std::int64_t row = at / segments, first = at % segments;
        const std::int64_t count = segments - first < range.end - at ? segments - first : range.end - at;
        const std::int64_t end = (first + count) * kSegment;
        const SamplingRow key = row_of(row);
        const Choice choice = kernels.best(key, static_cast<int>(first) * kSegment,
                                           end < vocab ? static_cast<int>(end) : vocab);
        offer(kernels, key, choice, out[row]);
        at += count;
    }
}

}  // namespace

void argmax(const Ctx& ctx, std::int64_t rows, const float* logits, std::int64_t stride, int vocab,
            std::int32_t* out) {
    choose(ctx, rows, vocab, out, [&](std::int64_t row) {
        return SamplingRow{.logits = logits + row * stride, .vocab = vocab, .inv_temperature = 0.0f, .seed_low = 0,
                           .seed_high = 0, .position = 0, .sample_index = 0};
    });
}

void noise_argmax(const Ctx& ctx, std::int64_t rows, const float* logits, std::int64_t stride, int vocab,
                  const float* inv_temperature, const std::uint64_t* seeds, const std::int32_t* sample_indices,
                  const std::int32_t* positions, std::int32_t* out) {
    choose(ctx, rows, vocab, out, [&](std::int64_t row) {
        return SamplingRow{.logits = logits + row * stride,
                           .vocab = vocab,
                           .inv_temperature = inv_temperature[row],
                           .seed_low = static_cast<std::uint32_t>(seeds[row]),
                           .seed_high = static_cast<std::uint32_t>(seeds[row] >> 32),
                           .position = static_cast<std::uint32_t>(positions[row]),
                           .sample_index = static_cast<std::uint32_t>(sample_indices[row])};
    });
}

}  // namespace pf
