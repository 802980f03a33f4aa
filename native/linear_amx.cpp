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
constexpr std::int64_t kBlockBytes = kKBlock * kUnit * 2;
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

void store_block(const LinearShare& s, std::int64_t row, int rows, std::int64_t unit, const float* sums) {
    for (int r = 0; r < rows; ++r) {
        __m512 row_sums[2] = {_mm512_load_ps(sums + r * kUnit), _mm512_load_ps(sums + r * kUnit + 16)};
        store_sums<Zmm>(s, row + r, unit, row_sums);
    }
}

// Fetches what follows tile 0 or 1 of a block of weights.
inline void prefetch_tile(const Prefetch& prefetch, const char* block, int tile) {
    for (int i = 16 * tile; i < 16 * (tile + 1); ++i) prefetch(block + i * kLine, i);
}

// Up to 16 rows by two units: four independent sums hide the 52 cycles that a tile product takes.
void block_1x2(const LinearShare& s, std::int64_t row, int rows, std::int64_t unit, const Prefetch& prefetch) {
    const Inputs in(s, row, rows);
    const char* w0 = static_cast<const char*>(unit_data(s, unit));
    const char* w1 = static_cast<const char*>(unit_data(s, unit + 1));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    // The last steps fetch the beginning of the next pair of units, which lies one unit further than it looks.
    const std::int64_t last_steps = num_k_blocks(s.w) - kPrefetchBytes / kBlockBytes;
    std::int64_t done = 0;
    const auto step = [&](const std::uint16_t* a, std::int64_t a_stride) {
        const std::int64_t skip = done++ < last_steps ? 0 : unit_bytes(s.w);
        _tile_loadd(4, a, a_stride * 2);
        prefetch_tile(prefetch, w0 + skip, 0);
        _tile_loadd(6, w0, 64);
        _tile_dpbf16ps(0, 4, 6);
        prefetch_tile(prefetch, w0 + skip, 1);
        _tile_loadd(7, w0 + 1024, 64);
        _tile_dpbf16ps(1, 4, 7);
        prefetch_tile(prefetch, w1 + skip, 0);
        _tile_loadd(6, w1, 64);
        _tile_dpbf16ps(2, 4, 6);
        prefetch_tile(prefetch, w1 + skip, 1);
        _tile_loadd(7, w1 + 1024, 64);
        _tile_dpbf16ps(3, 4, 7);
        w0 += kBlockBytes;
        w1 += kBlockBytes;
    };
    std::int64_t k = 0;
    for (; k + kKBlock <= s.w.k; k += kKBlock) step(in.data + k, in.stride);
    if (k < s.w.k) step(in.padded[0], kKBlock);
    alignas(64) float sums[2][kTileRows * kUnit];
    _tile_stored(0, sums[0], kUnit * 4);
    _tile_stored(1, sums[0] + 16, kUnit * 4);
    _tile_stored(2, sums[1], kUnit * 4);
    _tile_stored(3, sums[1] + 16, kUnit * 4);
    store_block(s, row, rows, unit, sums[0]);
    store_block(s, row, rows, unit + 1, sums[1]);
}

// One unit by up to 16 (kRowTiles = 1) or 32 rows.
template <int kRowTiles>
void block_rows(const LinearShare& s, std::int64_t row, int rows, std::int64_t unit, const Prefetch& prefetch) {
    const Inputs in(s, row, rows);
    const char* w = static_cast<const char*>(unit_data(s, unit));
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kRowTiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const auto step = [&](const std::uint16_t* a, std::int64_t a_stride) {
        _tile_loadd(4, a, a_stride * 2);
        prefetch_tile(prefetch, w, 0);
        _tile_loadd(6, w, 64);
        prefetch_tile(prefetch, w, 1);
        _tile_loadd(7, w + 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kRowTiles == 2) {
            _tile_loadd(5, a + kTileRows * a_stride, a_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        w += kBlockBytes;
    };
    std::int64_t k = 0;
    for (; k + kKBlock <= s.w.k; k += kKBlock) step(in.data + k, in.stride);
    if (k < s.w.k) step(in.padded[0], kKBlock);
    alignas(64) float sums[kRowTiles * kTileRows * kUnit];
    _tile_stored(0, sums, kUnit * 4);
    _tile_stored(1, sums + 16, kUnit * 4);
    if constexpr (kRowTiles == 2) {
        _tile_stored(2, sums + kTileRows * kUnit, kUnit * 4);
        _tile_stored(3, sums + kTileRows * kUnit + 16, kUnit * 4);
    }
    store_block(s, row, rows, unit, sums);
}

// Rows that fill one tile: the weights are read once, two streams at a time.
void linear_few_rows(const LinearShare& s, Tiles& tiles) {
    const int rows = static_cast<int>(s.rows);
    tiles.configure(rows, 0);
    const Prefetch prefetch(0, 1, 0);
    std::int64_t unit = s.unit_begin;
    for (; unit + 2 <= s.unit_end; unit += 2) block_1x2(s, 0, rows, unit, prefetch);
    if (unit < s.unit_end) block_rows<1>(s, 0, rows, unit, prefetch);
}

// Blocks of 32 rows by one unit. A group of units stays in the cache for all rows, and a block's inputs and outputs
// stay in it for all units of the group.
void linear_many_rows(const LinearShare& s, Tiles& tiles) {
    const std::int64_t group_units = std::max<std::int64_t>(kGroupBytes / unit_bytes(s.w), 1);
    const int num_blocks = static_cast<int>((s.rows + 31) / 32);
    for (std::int64_t group = s.unit_begin; group < s.unit_end; group += group_units) {
        const std::int64_t group_end = std::min(group + group_units, s.unit_end);
        for (int i = 0; i < num_blocks; ++i) {
            const Prefetch prefetch(i, num_blocks, group_units * unit_bytes(s.w));
            const int rows = static_cast<int>(std::min<std::int64_t>(32, s.rows - i * 32));
            tiles.configure(std::min(rows, kTileRows), std::max(rows - kTileRows, 0));
            for (std::int64_t unit = group; unit < group_end; ++unit) {
                if (rows > kTileRows) block_rows<2>(s, i * 32, rows, unit, prefetch);
                else block_rows<1>(s, i * 32, rows, unit, prefetch);
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
