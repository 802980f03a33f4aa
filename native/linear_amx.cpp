// bf16 linear layers on AMX tiles: a tile of C is 16 rows by 16 columns of float32 sums.
//
// Every row count takes this path, the last tile configured with the rows that remain: a row's bits are the same alone,
// among 16 and in a prefill of 512. Tiles: 0-3 sums, 4-5 inputs (A), 6-7 weights (B).

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "linear.h"

namespace pf::amx {
namespace {

#include "linear_simd.h"
#include "linear_zmm.h"

constexpr int kTileRows = 16;
constexpr std::int64_t kTileBytes = kKBlock * kUnit * 2;
// Weights that stay in the second-level cache (2 MB on every CPU with AMX) while all rows pass by.
constexpr std::int64_t kGroupBytes = 512 << 10;

struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_per_row[16] = {};
    std::uint8_t rows[16] = {};
};

// Tiles for blocks of m0 + m1 rows (m1 = 0: one tile of rows); reloaded only when the shape changes.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    void configure(int m0, int m1) {
        if (m0 == m0_ && m1 == m1_) return;
        m0_ = m0;
        m1_ = m1;
        const int second = m1 == 0 ? m0 : m1;
        const int rows[8] = {m0, m0, second, second, m0, second, kTileRows, kTileRows};
        TileConfig config;
        for (int i = 0; i < 8; ++i) {
            config.bytes_per_row[i] = 64;
            config.rows[i] = static_cast<std::uint8_t>(rows[i]);
        }
        _tile_loadconfig(&config);
    }

  private:
    int m0_ = -1, m1_ = -1;
};

// Where a tile of inputs lies: in x, or, for a last block of fewer than 32 inputs, in a zero-padded copy.
struct Inputs {
    const std::uint16_t* data;
    std::int64_t stride;
    alignas(64) std::uint16_t padded[2 * kTileRows][kKBlock];

    Inputs(const LinearShare& s, std::int64_t row, int rows) : data(x_row_bf16(s, row)), stride(s.x_stride) {
        const std::int64_t tail = s.w.k % kKBlock;
        if (tail == 0) return;
        std::memset(padded, 0, sizeof padded);
        for (int r = 0; r < rows; ++r) {
            std::memcpy(padded[r], data + r * stride + s.w.k - tail, static_cast<std::size_t>(tail) * 2);
        }
    }
};

void store_tile(const LinearShare& s, std::int64_t row, int rows, std::int64_t unit, const float* sums) {
    for (int r = 0; r < rows; ++r) {
        __m512 row_sums = _mm512_load_ps(sums + r * kUnit);
        store_sums<Zmm>(s, row + r, unit, &row_sums);
    }
}

// Fetches a tile of weights to be used later; step: number of the tile in use in its unit.
inline void prefetch_tile(const Prefetch& prefetch, const char* tile, std::int64_t step) {
    const int first_line = step % 2 == 0 ? 0 : 16;
    PF_UNROLL
    for (int i = 0; i < 16; ++i) prefetch(tile + i * kLine, first_line + i);
}

// Calls step(a, stride, step number) with the tiles of inputs in order.
template <class Step>
inline void for_each_step(const LinearShare& s, const Inputs& in, Step&& step) {
    std::int64_t k = 0;
    for (; k + kKBlock <= s.w.k; k += kKBlock) step(in.data + k, in.stride, k / kKBlock);
    if (k < s.w.k) step(in.padded[0], kKBlock, k / kKBlock);
}

// Up to 16 rows by U units: four independent sums hide the 52 cycles that a tile product takes.
template <int U>
void block_columns(const LinearShare& s, int rows, std::int64_t unit, const char* next) {
    const Inputs in(s, 0, rows);
    const char* w = unit_data(s, unit);
    const std::int64_t bytes = unit_bytes(s.w);
    const Prefetch prefetch = Prefetch::stream(w, bytes, next);
    _tile_zero(0);
    if constexpr (U >= 2) _tile_zero(1);
    if constexpr (U == 4) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for_each_step(s, in, [&](const std::uint16_t* a, std::int64_t a_stride, std::int64_t step) {
        const std::int64_t ahead = prefetch.ahead(step * kTileBytes);
        _tile_loadd(4, a, a_stride * 2);
        prefetch_tile(prefetch, w + ahead, step);
        _tile_loadd(6, w, kLine);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (U >= 2) {
            prefetch_tile(prefetch, w + bytes + ahead, step);
            _tile_loadd(7, w + bytes, kLine);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (U == 4) {
            prefetch_tile(prefetch, w + 2 * bytes + ahead, step);
            _tile_loadd(6, w + 2 * bytes, kLine);
            _tile_dpbf16ps(2, 4, 6);
            prefetch_tile(prefetch, w + 3 * bytes + ahead, step);
            _tile_loadd(7, w + 3 * bytes, kLine);
            _tile_dpbf16ps(3, 4, 7);
        }
        w += kTileBytes;
    });
    alignas(64) float sums[U][kTileRows * kUnit];
    _tile_stored(0, sums[0], kLine);
    if constexpr (U >= 2) _tile_stored(1, sums[1], kLine);
    if constexpr (U == 4) {
        _tile_stored(2, sums[2], kLine);
        _tile_stored(3, sums[3], kLine);
    }
    for (int u = 0; u < U; ++u) store_tile(s, 0, rows, unit + u, sums[u]);
}

// One or two (U) units by up to 16 (T = 1) or 32 rows (T = 2).
template <int T, int U>
void block_rows(const LinearShare& s, std::int64_t row, int rows, std::int64_t unit, const Prefetch& prefetch) {
    const Inputs in(s, row, rows);
    const char* w = unit_data(s, unit);
    const std::int64_t bytes = unit_bytes(s.w);
    _tile_zero(0);
    if constexpr (U == 2) _tile_zero(1);
    if constexpr (T == 2) _tile_zero(2);
    if constexpr (T == 2 && U == 2) _tile_zero(3);
    for_each_step(s, in, [&](const std::uint16_t* a, std::int64_t a_stride, std::int64_t step) {
        const std::int64_t ahead = prefetch.ahead(step * kTileBytes);
        _tile_loadd(4, a, a_stride * 2);
        prefetch_tile(prefetch, w + ahead, step);
        _tile_loadd(6, w, kLine);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (U == 2) {
            prefetch_tile(prefetch, w + bytes + ahead, step);
            _tile_loadd(7, w + bytes, kLine);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (T == 2) {
            _tile_loadd(5, a + kTileRows * a_stride, a_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (U == 2) _tile_dpbf16ps(3, 5, 7);
        }
        w += kTileBytes;
    });
    alignas(64) float sums[4][kTileRows * kUnit];
    const int first_rows = std::min(rows, kTileRows);
    _tile_stored(0, sums[0], kLine);
    store_tile(s, row, first_rows, unit, sums[0]);
    if constexpr (U == 2) {
        _tile_stored(1, sums[1], kLine);
        store_tile(s, row, first_rows, unit + 1, sums[1]);
    }
    if constexpr (T == 2) {
        _tile_stored(2, sums[2], kLine);
        store_tile(s, row + kTileRows, rows - kTileRows, unit, sums[2]);
        if constexpr (U == 2) {
            _tile_stored(3, sums[3], kLine);
            store_tile(s, row + kTileRows, rows - kTileRows, unit + 1, sums[3]);
        }
    }
}

// Rows that fill one tile: the weights are read once, four streams side by side where there are as many units.
void linear_few_rows(const LinearShare& s, Tiles& tiles) {
    const int rows = static_cast<int>(s.rows);
    tiles.configure(rows, 0);
    for (std::int64_t unit = s.unit_begin, taken; unit < s.unit_end; unit += taken) {
        const std::int64_t left = s.unit_end - unit;
        taken = left >= 4 ? 4 : std::min<std::int64_t>(left, 2);
        const char* next = taken < left ? unit_data(s, unit + taken) : s.next;
        if (taken == 4) block_columns<4>(s, rows, unit, next);
        else if (taken == 2) block_columns<2>(s, rows, unit, next);
        else block_columns<1>(s, rows, unit, next);
    }
}

// Blocks of 32 rows by two units. A group of units stays in the cache for all rows, and a block's inputs and outputs
// stay in it for all units of the group.
void linear_many_rows(const LinearShare& s, Tiles& tiles) {
    const std::int64_t group_units = std::max<std::int64_t>(kGroupBytes / unit_bytes(s.w) / 2 * 2, 2);
    const int num_blocks = static_cast<int>((s.rows + 31) / 32);
    for (std::int64_t group = s.unit_begin; group < s.unit_end; group += group_units) {
        const std::int64_t group_end = std::min(group + group_units, s.unit_end);
        for (int i = 0; i < num_blocks; ++i) {
            const Prefetch prefetch = num_blocks == 1 ? Prefetch{kPrefetchBytes}
                                                      : Prefetch::shared(i, num_blocks, group_units * unit_bytes(s.w));
            const int rows = static_cast<int>(std::min<std::int64_t>(32, s.rows - i * 32));
            tiles.configure(std::min(rows, kTileRows), std::max(rows - kTileRows, 0));
            for (std::int64_t unit = group; unit < group_end; unit += 2) {
                const bool pair = unit + 1 < group_end;
                if (rows > kTileRows) pair ? block_rows<2, 2>(s, i * 32, rows, unit, prefetch)
                                           : block_rows<2, 1>(s, i * 32, rows, unit, prefetch);
                else pair ? block_rows<1, 2>(s, i * 32, rows, unit, prefetch)
                          : block_rows<1, 1>(s, i * 32, rows, unit, prefetch);
            }
        }
    }
}

}  // namespace

void linear_bf16(const LinearShare& s) {
    Tiles tiles;
    if (s.rows <= kTileRows) linear_few_rows(s, tiles);
    else linear_many_rows(s, tiles);
}

}  // namespace pf::amx
