// Memory in huge pages, and weights packed into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "kernels.h"
#include "team.h"

namespace pf {

// Anonymous, zeroed memory aligned to 2 MB, in huge pages where the system gives them: reading a model's weights once a
// step through 4 KB pages would miss the TLB every 64 cache lines. Throws std::bad_alloc.
class HugeBuffer {
  public:
    explicit HugeBuffer(std::size_t bytes);
    ~HugeBuffer();
    HugeBuffer(const HugeBuffer&) = delete;
    HugeBuffer& operator=(const HugeBuffer&) = delete;

    char* data() const { return data_; }
    std::size_t size() const { return bytes_; }

  private:
    std::size_t bytes_;
    void* mapping_;
    std::size_t mapping_bytes_;
    char* data_;
};

// Hands out pieces of large huge-page buffers, so that small weights share huge pages. A buffer is given back when the
// last piece of it dies. Thread-safe.
class Arena {
  public:
    std::shared_ptr<char> allocate(std::size_t bytes);

  private:
    std::mutex mutex_;
    std::shared_ptr<HugeBuffer> buffer_;
    std::size_t used_ = 0;
};

// A packed weight that owns its memory.
struct OwnedLinear {
    PackedLinear view;
    std::shared_ptr<char> data, bias;
};

// Packs rows [n, k] of src_dtype (row_stride in elements) as kernels.h says, on all threads of the team, rounding
// float32 to the nearest even bf16. bias: float32 [n] or null; copied.
std::shared_ptr<OwnedLinear> pack_linear(Arena&, Team&, const void* source, DType src_dtype, std::int64_t n,
                                         std::int64_t k, std::int64_t row_stride, DType dst_dtype, const float* bias);

// Reads the buffer once on all threads and returns a sum over its cache lines: what a memory-bound kernel can at best do.
std::uint64_t read_all(Team&, const HugeBuffer&);

}  // namespace pf
