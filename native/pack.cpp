#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <new>

#include "linear.h"
#include "memory.h"

namespace pf {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kArenaBuffer = std::size_t{32} << 20;

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::uint16_t to_bf16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (value != value) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float to_f32(std::uint16_t value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16); }

template <class To, class From>
To convert(From value) {
    if constexpr (std::is_same_v<To, From>) return value;
    else if constexpr (std::is_same_v<To, float>) return to_f32(value);
    else return to_bf16(value);
}

struct Source {
    const void* data;
    std::int64_t n, k, row_stride;
};

template <class From>
void pack_unit_bf16(const Source& s, std::int64_t unit, std::uint16_t* out) {
    const std::int64_t columns = std::min(kUnit, s.n - unit * kUnit);
    for (std::int64_t column = 0; column < columns; ++column) {
        const From* row = static_cast<const From*>(s.data) + (unit * kUnit + column) * s.row_stride;
        std::uint16_t* target = out + column * 2;
        for (std::int64_t k = 0; k < s.k; ++k) target[k / 2 * 2 * kUnit + k % 2] = convert<std::uint16_t>(row[k]);
    }
}

template <class From>
void pack_unit_f32(const Source& s, std::int64_t unit, float* out) {
    const std::int64_t columns = std::min(kUnit, s.n - unit * kUnit);
    for (std::int64_t column = 0; column < columns; ++column) {
        const From* row = static_cast<const From*>(s.data) + (unit * kUnit + column) * s.row_stride;
        for (std::int64_t k = 0; k < s.k; ++k) out[k * kUnit + column] = convert<float>(row[k]);
    }
}

}  // namespace

HugeBuffer::HugeBuffer(std::size_t bytes) : bytes_(bytes), mapping_bytes_(round_up(bytes, kHugePage) + kHugePage) {
    mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) throw std::bad_alloc();
    data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<std::size_t>(mapping_), kHugePage));
#if defined(MADV_HUGEPAGE)
    madvise(data_, round_up(bytes, kHugePage), MADV_HUGEPAGE);  // a hint: refusing it costs speed only
#endif
}

HugeBuffer::~HugeBuffer() { munmap(mapping_, mapping_bytes_); }

std::shared_ptr<char> Arena::allocate(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    bytes = round_up(std::max<std::size_t>(bytes, 1), 4096);
    if (buffer_ == nullptr || used_ + bytes > buffer_->size()) {
        buffer_ = std::make_shared<HugeBuffer>(std::max(bytes, kArenaBuffer));
        used_ = 0;
    }
    const std::shared_ptr<char> piece(buffer_, buffer_->data() + used_);
    used_ += bytes;
    return piece;
}

std::shared_ptr<OwnedLinear> pack_linear(Arena& arena, Team& team, const void* source, DType src_dtype, std::int64_t n,
                                         std::int64_t k, std::int64_t row_stride, DType dst_dtype, const float* bias) {
    auto linear = std::make_shared<OwnedLinear>();
    linear->view = {dst_dtype, n, k, nullptr, nullptr};
    const std::int64_t units = num_units(linear->view), bytes = unit_bytes(linear->view);
    linear->data = arena.allocate(static_cast<std::size_t>(units * bytes));
    linear->view.data = linear->data.get();
    if (bias != nullptr) {
        linear->bias = arena.allocate(static_cast<std::size_t>(n) * sizeof(float));
        std::memcpy(linear->bias.get(), bias, static_cast<std::size_t>(n) * sizeof(float));
        linear->view.bias = reinterpret_cast<const float*>(linear->bias.get());
    }
    const Source s{source, n, k, row_stride};
    team.run([&](int tid) {
        const std::int64_t threads = team.num_threads();
        for (std::int64_t unit = units * tid / threads; unit < units * (tid + 1) / threads; ++unit) {
            char* out = linear->data.get() + unit * bytes;
            if (dst_dtype == DType::f32) {
                float* target = reinterpret_cast<float*>(out);
                if (src_dtype == DType::f32) pack_unit_f32<float>(s, unit, target);
                else pack_unit_f32<std::uint16_t>(s, unit, target);
            } else {
                std::uint16_t* target = reinterpret_cast<std::uint16_t*>(out);
                if (src_dtype == DType::f32) pack_unit_bf16<float>(s, unit, target);
                else pack_unit_bf16<std::uint16_t>(s, unit, target);
            }
        }
    });
    return linear;
}

std::uint64_t read_all(Team& team, const HugeBuffer& buffer) {
    constexpr std::int64_t kStreams = 4;  // the hardware fetches several streams faster than one
    constexpr std::int64_t kWords = kLine / 8;
    std::atomic<std::uint64_t> total{0};
    const std::int64_t part = static_cast<std::int64_t>(buffer.size()) / kLine / kStreams / team.num_threads();
    team.run([&](int tid) {
        const auto* words = reinterpret_cast<const std::uint64_t*>(buffer.data()) + tid * kStreams * part * kWords;
        std::uint64_t sum = 0;
        for (std::int64_t line = 0; line < part; ++line) {
            for (std::int64_t stream = 0; stream < kStreams; ++stream) {
                const std::uint64_t* word = words + (stream * part + line) * kWords;
                __builtin_prefetch(word + 32 * kWords, 0, 3);
                sum += *word;  // one word fetches the whole line
            }
        }
        total += sum;
    });
    return total;
}

}  // namespace pf
