// Linear layers and the embedding: sharing out the work, and choosing the instruction set's kernel.

#include "linear.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pf {
namespace {

using Kernel = void (*)(const LinearShare&);

Kernel kernel_for(Isa isa, DType dtype) {
    [[maybe_unused]] const bool f32 = dtype == DType::f32;
    switch (isa) {
#if defined(PF_HAVE_AMX)
        case Isa::amx: return f32 ? avx512::linear_f32 : amx::linear_bf16;
#endif
#if defined(PF_HAVE_AVX512_BF16)
        case Isa::avx512_bf16: return f32 ? avx512::linear_f32 : avx512_bf16::linear_bf16;
#endif
#if defined(PF_HAVE_AVX512)
        case Isa::avx512: return f32 ? avx512::linear_f32 : avx512::linear_bf16;
#endif
#if defined(PF_HAVE_AVX2)
        case Isa::avx2: return f32 ? avx2::linear_f32 : avx2::linear_bf16;
#endif
        default: return nullptr;  // no program can be made with an instruction set that supported_isas() lacks
    }
}

// Columns go to threads in whole units, inputs never: a sum is always one thread's, so bits don't depend on threads.
using Range = std::pair<std::int64_t, std::int64_t>;

Range share_of(const Ctx& ctx, std::int64_t total) {
    return {total * ctx.tid / ctx.num_threads, total * (ctx.tid + 1) / ctx.num_threads};
}

// Up to this many rows, reading the weights is what takes time.
constexpr std::int64_t kFewRows = 16;

// Few rows: threads take columns as they go, for none of them gets the same bandwidth all the time and all wait for the
// last. Four units at a time, two and one at the end, so that threads finish together.
class Portions {
  public:
    Portions(std::int64_t num_units, int num_threads) {
        num_quads_ = std::max<std::int64_t>(num_units - 4 * num_threads, 0) / 4;
        const std::int64_t rest = num_units - 4 * num_quads_;
        num_pairs_ = rest / 2;
        count_ = num_quads_ + num_pairs_ + rest % 2;
    }

    std::int64_t count() const { return count_; }

    Range units(std::int64_t i) const {
        if (i < num_quads_) return {4 * i, 4 * i + 4};
        const std::int64_t unit = 2 * (num_quads_ + i);
        return i < num_quads_ + num_pairs_ ? Range{unit, unit + 2} : Range{unit, unit + 1};
    }

  private:
    std::int64_t num_quads_, num_pairs_, count_;
};

const char* unit_address(const PackedLinear& w, std::int64_t unit) {
    return static_cast<const char*>(w.data) + unit * unit_bytes(w);
}

void embed_row(const PackedLinear& table, std::int64_t id, void* out) {
    const std::int64_t unit = id / kUnit, column = id % kUnit;
    const char* base = static_cast<const char*>(table.data) + unit * unit_bytes(table);
    if (table.dtype == DType::f32) {
        const float* source = reinterpret_cast<const float*>(base) + column;
        float* target = static_cast<float*>(out);
        for (std::int64_t k = 0; k < table.k; ++k) target[k] = source[k * kUnit];
        return;
    }
    // Pairs of inputs lie together: [K/2][16 columns][2].
    const char* source = base + column * 4;
    char* target = static_cast<char*>(out);
    for (std::int64_t k = 0; k < table.k; k += 2) {
        std::memcpy(target + k * 2, source + k / 2 * kLine, k + 1 < table.k ? 4 : 2);
    }
}

}  // namespace

void linear(const Ctx& ctx, std::int64_t rows, const void* x, std::int64_t x_stride, const PackedLinear& w, void* y,
            std::int64_t y_stride, DType y_dtype) {
    if (rows == 0) return;
    const Kernel kernel = kernel_for(ctx.isa, w.dtype);
    if (rows > kFewRows) {
        const auto [begin, end] = share_of(ctx, num_units(w));
        if (begin < end) kernel({rows, x, x_stride, w, y, y_stride, y_dtype, begin, end, unit_address(w, begin)});
        return;
    }
    const Portions portions(num_units(w), ctx.num_threads);
    for (std::int64_t i = ctx.tid, next; i < portions.count(); i = next) {
        next = ctx.next_work->fetch_add(1, std::memory_order_relaxed);
        const auto [begin, end] = portions.units(i);
        const char* follows = unit_address(w, portions.units(next < portions.count() ? next : i).first);
        kernel({rows, x, x_stride, w, y, y_stride, y_dtype, begin, end, follows});
    }
}

LinearPrefetch::LinearPrefetch(const Ctx& ctx, std::int64_t rows, const PackedLinear& w) : unit_bytes_(unit_bytes(w)) {
    Range range = share_of(ctx, num_units(w));
    if (rows <= kFewRows) {
        const Portions portions(num_units(w), ctx.num_threads);
        range = ctx.tid < portions.count() ? portions.units(ctx.tid) : Range{0, 0};
    }
    first_ = unit_address(w, range.first);
    num_units_ = std::min<std::int64_t>(range.second - range.first, 4);
}

void LinearPrefetch::some() {
    if (done_ == unit_bytes_) return;
    for (std::int64_t unit = 0; unit < num_units_; ++unit) __builtin_prefetch(first_ + unit * unit_bytes_ + done_, 0, 2);
    done_ += kLine;
}

void embedding(const Ctx& ctx, std::int64_t rows, const std::int32_t* token_ids, const PackedLinear& table, void* out,
               std::int64_t out_stride) {
    const auto [begin, end] = share_of(ctx, rows);
    const std::int64_t row_bytes = out_stride * static_cast<std::int64_t>(size_of(table.dtype));
    for (std::int64_t t = begin; t < end; ++t) {
        // An id outside the table would read wild memory; the engine refuses it long before, this is the last line.
        const std::int64_t id = std::clamp<std::int64_t>(token_ids[t], 0, table.n - 1);
        embed_row(table, id, static_cast<char*>(out) + t * row_bytes);
    }
}

}  // namespace pf
