// The linear kernels of the vector instruction sets, written once over a vector type V.
//
// Included by linear_<isa>.cpp inside that set's namespace, so that each has its own copies compiled with its own flags.
// A block is R rows by U units of 16 columns; its sums stay in registers while the units' weights stream past, side by
// side. Each sum takes its inputs in ascending order in a single accumulator, whatever R and U are: bits depend on neither.

// Sums stay in registers only if every loop over them is unrolled.
#define PF_UNROLL _Pragma("GCC unroll 32")

// Fetches the weights that come next. One block of rows: the same streams, kPrefetchBytes ahead. Several: while the
// units are used again and again out of the cache, each block fetches its share of what comes next. Requests are spread
// between the arithmetic: a burst of them would fill the core's fill buffers and stall the loads behind it.
struct Prefetch {
    std::int64_t distance;                // bytes from the weights in use to the weights to fetch
    std::int64_t break_at = INT64_MAX;    // offset in the unit from which the fetched weights are another unit's
    std::int64_t jump = 0;                // bytes to add from there on
    std::uint32_t lines = ~0u;            // which of every 32 cache lines to fetch

    // One block of rows reads the units at `units`, of `bytes` each, and then those at `next`.
    static Prefetch stream(const void* units, std::int64_t bytes, const void* next) {
        const auto begin = reinterpret_cast<std::uintptr_t>(units), after = reinterpret_cast<std::uintptr_t>(next);
        return {kPrefetchBytes, bytes - kPrefetchBytes, static_cast<std::int64_t>(after - begin) - bytes};
    }

    // Several blocks of rows read the same weights, and then those that lie next_bytes further.
    static Prefetch shared(int block, int num_blocks, std::int64_t next_bytes) {
        Prefetch prefetch{next_bytes};
        prefetch.lines = 0;
        for (int i = block; i < 32; i += num_blocks) prefetch.lines |= 1u << i;
        return prefetch;
    }

    // Bytes from weights at this offset in their unit to those that are to be fetched meanwhile.
    std::int64_t ahead(std::int64_t offset) const { return distance + (offset >= break_at ? jump : 0); }

    // Fetches a line; i: its number in the unit, modulo 32.
    void operator()(const char* line, int i) const {
        if ((lines >> i & 1u) != 0) _mm_prefetch(line, _MM_HINT_T0);
    }
};

inline const std::uint16_t* x_row_bf16(const LinearShare& s, std::int64_t row) {
    return static_cast<const std::uint16_t*>(s.x) + row * s.x_stride;
}

inline const char* unit_data(const LinearShare& s, std::int64_t unit) {
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

// Adds the bias to the finished sums of one row and unit (fewer in a last, partial unit), rounds and writes them.
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

template <class V, int R, int U>
inline void store_block(const LinearShare& s, std::int64_t row, std::int64_t unit, typename V::reg* sums) {
    constexpr int kPerUnit = static_cast<int>(kUnit) / V::kWidth;
    PF_UNROLL
    for (int r = 0; r < R; ++r) {
        PF_UNROLL
        for (int u = 0; u < U; ++u) store_sums<V>(s, row + r, unit + u, sums + (r * U + u) * kPerUnit);
    }
}

// float32 weights: one multiply-add an input.
template <class V, int R, int U>
void block_f32(const LinearShare& s, std::int64_t row, std::int64_t unit, const Prefetch& prefetch) {
    constexpr int kPerUnit = static_cast<int>(kUnit) / V::kWidth, kVectors = U * kPerUnit;
    typename V::reg sums[R * kVectors];
    const float* x[R];
    PF_UNROLL
    for (int r = 0; r < R; ++r) x[r] = static_cast<const float*>(s.x) + (row + r) * s.x_stride;
    PF_UNROLL
    for (int i = 0; i < R * kVectors; ++i) sums[i] = V::zero();
    const char* w = unit_data(s, unit);
    const std::int64_t bytes = unit_bytes(s.w);
    for (std::int64_t k = 0; k < s.w.k; ++k, w += kLine) {
        const std::int64_t ahead = prefetch.ahead(k * kLine);
        typename V::reg b[kVectors];
        PF_UNROLL
        for (int u = 0; u < U; ++u) {
            prefetch(w + u * bytes + ahead, static_cast<int>(k % 32));
            PF_UNROLL
            for (int v = 0; v < kPerUnit; ++v) {
                b[u * kPerUnit + v] = V::load(reinterpret_cast<const float*>(w + u * bytes) + v * V::kWidth);
            }
        }
        PF_UNROLL
        for (int r = 0; r < R; ++r) {
            const typename V::reg a = V::set1(x[r][k]);
            PF_UNROLL
            for (int v = 0; v < kVectors; ++v) sums[r * kVectors + v] = V::fma(a, b[v], sums[r * kVectors + v]);
        }
    }
    store_block<V, R, U>(s, row, unit, sums);
}

// bf16 weights without bf16 arithmetic: a pair of weights is a 32-bit lane, widened to float32 by a shift and a mask.
template <class V, int R, int U>
void block_bf16_widened(const LinearShare& s, std::int64_t row, std::int64_t unit, const Prefetch& prefetch) {
    constexpr int kPerUnit = static_cast<int>(kUnit) / V::kWidth, kVectors = U * kPerUnit;
    typename V::reg sums[R * kVectors];
    PF_UNROLL
    for (int i = 0; i < R * kVectors; ++i) sums[i] = V::zero();
    alignas(64) float x[R][kKBlock];
    const char* w = unit_data(s, unit);
    const std::int64_t bytes = unit_bytes(s.w);
    for (std::int64_t k = 0; k < s.w.k; k += kKBlock) {
        const std::int64_t count = std::min(kKBlock, s.w.k - k);
        PF_UNROLL
        for (int r = 0; r < R; ++r) V::widen_block(x_row_bf16(s, row + r) + k, count, x[r]);
        const std::int64_t ahead = prefetch.ahead(k / 2 * kLine);
        const int first_line = static_cast<int>(k / 2 % 32);
        for (int pair = 0; pair < 16; ++pair, w += kLine) {
            PF_UNROLL
            for (int v = 0; v < kVectors; ++v) {
                const char* line = w + v / kPerUnit * bytes;
                if (v % kPerUnit == 0) prefetch(line + ahead, first_line + pair);
                const auto lanes = V::load_pairs(line + v % kPerUnit * V::kWidth * 4);
                const typename V::reg even = V::widen_even(lanes), odd = V::widen_odd(lanes);
                PF_UNROLL
                for (int r = 0; r < R; ++r) {
                    sums[r * kVectors + v] = V::fma(V::set1(x[r][2 * pair]), even, sums[r * kVectors + v]);
                    sums[r * kVectors + v] = V::fma(V::set1(x[r][2 * pair + 1]), odd, sums[r * kVectors + v]);
                }
            }
        }
    }
    store_block<V, R, U>(s, row, unit, sums);
}

template <int N>
using Count = std::integral_constant<int, N>;

// Calls block(Count<R>, Count<U>, row, unit, prefetch) for all of a thread's columns: four units by up to kQuadRows rows
// where that covers all rows, else two (one at the end) by up to kMaxRows.
template <int kQuadRows, int kMaxRows, class Block>
void for_each_block(const LinearShare& s, Block&& block) {
    const int num_blocks = static_cast<int>((s.rows + kMaxRows - 1) / kMaxRows);
    for (std::int64_t unit = s.unit_begin, taken; unit < s.unit_end; unit += taken) {
        const std::int64_t left = s.unit_end - unit;
        taken = left >= 4 && s.rows <= kQuadRows ? 4 : std::min<std::int64_t>(left, 2);
        const char* weights = unit_data(s, unit);
        const char* next = taken < left ? weights + taken * unit_bytes(s.w) : s.next;
        for (int i = 0; i < num_blocks; ++i) {
            const std::int64_t row = static_cast<std::int64_t>(i) * kMaxRows;
            const int rows = static_cast<int>(std::min<std::int64_t>(kMaxRows, s.rows - row));
            const Prefetch prefetch = num_blocks == 1 ? Prefetch::stream(weights, unit_bytes(s.w), next)
                                                      : Prefetch::shared(i, num_blocks, next - weights);
            [&]<int... I>(std::integer_sequence<int, I...>) {
                const auto call = [&](auto r) {
                    if (taken == 2) block(r, Count<2>{}, row, unit, prefetch);
                    else if (taken == 1) block(r, Count<1>{}, row, unit, prefetch);
                    else if constexpr (decltype(r)::value <= kQuadRows) block(r, Count<4>{}, row, unit, prefetch);
                    return true;
                };
                (void)((rows == I + 1 && call(Count<I + 1>{})) || ...);
            }(std::make_integer_sequence<int, kMaxRows>{});
        }
    }
}
