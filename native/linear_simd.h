// The linear kernels of the vector instruction sets, written once over a vector type V.
//
// Included by linear_<isa>.cpp inside that set's namespace, so that each has its own copies compiled with its own flags.
// A block is R rows by one unit of 32 columns; its R * 32 sums stay in registers while the unit's weights stream past.
// Each sum takes its inputs in ascending order in a single accumulator, whatever R is: bits don't depend on the rows.

// Sums stay in registers only if every loop over them is unrolled.
#define PF_UNROLL _Pragma("GCC unroll 16")

// Fetches the weights that come next. One block of rows: the same stream, kPrefetchBytes ahead. Several: while the unit
// is used again and again out of the cache, each block fetches its share of what comes next. Requests are spread between
// the arithmetic: a burst of them would fill the core's fill buffers and stall the loads behind it.
struct Prefetch {
    std::int64_t distance;  // bytes from the weights in use to the weights to fetch
    std::uint32_t lines;    // which of every 32 cache lines to fetch

    // next_bytes: how far away the next weights are when there are several blocks.
    Prefetch(int block, int num_blocks, std::int64_t next_bytes)
        : distance(num_blocks == 1 ? kPrefetchBytes : next_bytes), lines(0) {
        for (int i = block; i < 32; i += num_blocks) lines |= 1u << i;
    }

    // weights: cache line number i (modulo 32) of the weights, in use now.
    void operator()(const char* weights, int i) const {
        if ((lines >> i & 1u) != 0) _mm_prefetch(weights + distance, _MM_HINT_T0);
    }
};

inline const std::uint16_t* x_row_bf16(const LinearShare& s, std::int64_t row) {
    return static_cast<const std::uint16_t*>(s.x) + row * s.x_stride;
}

inline const void* unit_data(const LinearShare& s, std::int64_t unit) {
    return static_cast<const char*>(s.w.data) + unit * unit_bytes(s.w);
}

template <class V>
inline void store_vectors(const LinearShare& s, std::int64_t row, std::int64_t column, const typename V::reg* sums) {
    constexpr int kVectors = static_cast<int>(kUnit) / V::kWidth;
    const std::int64_t offset = row * s.y_stride + column;
    PF_UNROLL
    for (int v = 0; v < kVectors; ++v) {
        if (s.y_dtype == DType::f32) V::storeu(static_cast<float*>(s.y) + offset + v * V::kWidth, sums[v]);
        else V::store_bf16(static_cast<std::uint16_t*>(s.y) + offset + v * V::kWidth, sums[v]);
    }
}

// Adds the bias to 32 finished sums of one row (fewer in a last, partial unit), rounds and writes them.
template <class V>
inline void store_sums(const LinearShare& s, std::int64_t row, std::int64_t unit, typename V::reg* sums) {
    constexpr int kVectors = static_cast<int>(kUnit) / V::kWidth;
    const std::int64_t column = unit * kUnit, count = std::min(kUnit, s.w.n - column);
    if (count < kUnit) {
        alignas(64) float bias[kUnit] = {}, padded[kUnit];
        if (s.w.bias != nullptr) std::memcpy(bias, s.w.bias + column, static_cast<std::size_t>(count) * 4);
        LinearShare last = s;
        last.y = padded;
        last.y_stride = 0;
        PF_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[v] = V::add(sums[v], V::load(bias + v * V::kWidth));
        store_vectors<V>(last, 0, 0, sums);
        const std::size_t size = size_of(s.y_dtype);
        std::memcpy(static_cast<char*>(s.y) + static_cast<std::size_t>(row * s.y_stride + column) * size, padded,
                    static_cast<std::size_t>(count) * size);
        return;
    }
    if (s.w.bias != nullptr) {
        PF_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[v] = V::add(sums[v], V::load(s.w.bias + column + v * V::kWidth));
    }
    store_vectors<V>(s, row, column, sums);
}

// float32 weights: one multiply-add an input.
template <class V, int R>
void block_f32(const LinearShare& s, std::int64_t row, std::int64_t unit, const Prefetch& prefetch) {
    constexpr int kVectors = static_cast<int>(kUnit) / V::kWidth;
    typename V::reg sums[R][kVectors];
    const float* x[R];
    PF_UNROLL
    for (int r = 0; r < R; ++r) {
        x[r] = static_cast<const float*>(s.x) + (row + r) * s.x_stride;
        PF_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] = V::zero();
    }
    const float* w = static_cast<const float*>(unit_data(s, unit));
    for (std::int64_t k = 0; k < s.w.k; ++k, w += kUnit) {
        prefetch(reinterpret_cast<const char*>(w), static_cast<int>(k % 16) * 2);
        prefetch(reinterpret_cast<const char*>(w + 16), static_cast<int>(k % 16) * 2 + 1);
        typename V::reg b[kVectors];
        PF_UNROLL
        for (int v = 0; v < kVectors; ++v) b[v] = V::load(w + v * V::kWidth);
        PF_UNROLL
        for (int r = 0; r < R; ++r) {
            const typename V::reg a = V::set1(x[r][k]);
            PF_UNROLL
            for (int v = 0; v < kVectors; ++v) sums[r][v] = V::fma(a, b[v], sums[r][v]);
        }
    }
    PF_UNROLL
    for (int r = 0; r < R; ++r) store_sums<V>(s, row + r, unit, sums[r]);
}

// bf16 weights without bf16 arithmetic: a pair of weights is a 32-bit lane, widened to float32 by a shift and a mask.
template <class V, int R>
void block_bf16_widened(const LinearShare& s, std::int64_t row, std::int64_t unit, const Prefetch& prefetch) {
    constexpr int kVectors = static_cast<int>(kUnit) / V::kWidth, kPerTile = 16 / V::kWidth;
    typename V::reg sums[R][kVectors];
    PF_UNROLL
    for (int r = 0; r < R; ++r) {
        PF_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] = V::zero();
    }
    alignas(64) float x[R][kKBlock];
    const char* w = static_cast<const char*>(unit_data(s, unit));
    for (std::int64_t k = 0; k < s.w.k; k += kKBlock, w += kKBlock * kUnit * 2) {
        const std::int64_t count = std::min(kKBlock, s.w.k - k);
        PF_UNROLL
        for (int r = 0; r < R; ++r) V::widen_block(x_row_bf16(s, row + r) + k, count, x[r]);
        for (int pair = 0; pair < 16; ++pair) {
            prefetch(w + pair * 128, pair * 2);
            prefetch(w + pair * 128 + 64, pair * 2 + 1);
            PF_UNROLL
            for (int v = 0; v < kVectors; ++v) {
                const auto lanes =
                    V::load_pairs(w + (v / kPerTile) * 1024 + pair * 64 + (v % kPerTile) * V::kWidth * 4);
                const typename V::reg even = V::widen_even(lanes), odd = V::widen_odd(lanes);
                PF_UNROLL
                for (int r = 0; r < R; ++r) {
                    sums[r][v] = V::fma(V::set1(x[r][2 * pair]), even, sums[r][v]);
                    sums[r][v] = V::fma(V::set1(x[r][2 * pair + 1]), odd, sums[r][v]);
                }
            }
        }
    }
    PF_UNROLL
    for (int r = 0; r < R; ++r) store_sums<V>(s, row + r, unit, sums[r]);
}

// Calls block(integral_constant<R>, row, unit, prefetch) for all of a thread's columns in blocks of at most kMaxRows.
template <int kMaxRows, class Block>
void for_each_block(const LinearShare& s, Block&& block) {
    const int num_blocks = static_cast<int>((s.rows + kMaxRows - 1) / kMaxRows);
    for (std::int64_t unit = s.unit_begin; unit < s.unit_end; ++unit) {
        for (int i = 0; i < num_blocks; ++i) {
            const std::int64_t row = static_cast<std::int64_t>(i) * kMaxRows;
            const int rows = static_cast<int>(std::min<std::int64_t>(kMaxRows, s.rows - row));
            const Prefetch prefetch(i, num_blocks, unit_bytes(s.w));
            [&]<int... I>(std::integer_sequence<int, I...>) {
                (void)((rows == I + 1 && (block(std::integral_constant<int, I + 1>{}, row, unit, prefetch), true)) || ...);
            }(std::make_integer_sequence<int, kMaxRows>{});
        }
    }
}
