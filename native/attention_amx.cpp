// Attention over bfloat16 caches on AMX tiles.
//
// A group of 16 tokens of K is [d_pad / 2][16 tokens][2], so each 32 dims of it are a B tile as they lie in memory; a
// group of V is [8 token pairs][d_pad][2], whose columns are B tiles of 8 rows. Tiles: 0-3 sums, 4 queries, 5 keys,
// 6 weights, 7 values.
#define PF_ISA amx
#include "attention_impl.h"

namespace pf::amx {
namespace {

struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_per_row[16] = {};
    std::uint8_t rows[16] = {};
};

struct AmxMath {
    using T = Bf16;
    using Q = Bf16;
    using W = Bf16;

    explicit AmxMath(int rows) {
        TileConfig config;
        for (int i = 0; i < 8; ++i) {
            config.bytes_per_row[i] = i == 6 ? 32 : 64;
            config.rows[i] = static_cast<std::uint8_t>(i == 5 ? 16 : i == 7 ? 8 : rows);
        }
        _tile_loadconfig(&config);
    }
    AmxMath(const AmxMath&) = delete;
    AmxMath& operator=(const AmxMath&) = delete;
    ~AmxMath() { _tile_release(); }

    static void pack(const Bf16* q, int dim, int d_pad, Bf16* out) { pack_bf16(q, dim, d_pad, out); }

    static void store_weights(Bf16* out, Vec p) { store(out, p); }

    // Four groups at a time: independent sums hide the 52 cycles that a tile product takes.
    static void scores(const Bf16* q, int, int d_pad, const T* const* k, int groups, float* out) {
        const int q_bytes = d_pad * 2, out_bytes = kScoreStride * 4;
        int g = 0;
        for (; g + 4 <= groups; g += 4) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int d = 0; d < d_pad; d += 32) {
                _tile_loadd(4, q + d, q_bytes);
                _tile_loadd(5, k[g] + d * kGroup, 64);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(5, k[g + 1] + d * kGroup, 64);
                _tile_dpbf16ps(1, 4, 5);
                _tile_loadd(5, k[g + 2] + d * kGroup, 64);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(5, k[g + 3] + d * kGroup, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
            float* at = out + g * kGroup;
            _tile_stored(0, at, out_bytes);
            _tile_stored(1, at + kGroup, out_bytes);
            _tile_stored(2, at + 2 * kGroup, out_bytes);
            _tile_stored(3, at + 3 * kGroup, out_bytes);
        }
        for (; g < groups; ++g) {
            _tile_zero(0);
            for (int d = 0; d < d_pad; d += 32) {
                _tile_loadd(4, q + d, q_bytes);
                _tile_loadd(5, k[g] + d * kGroup, 64);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, out + g * kGroup, out_bytes);
        }
    }

    static void values(const Bf16* weights, int, int d_pad, const T* const* v, int groups, float* out) {
        const int v_bytes = d_pad * 4, out_bytes = d_pad * 4, weight_bytes = kScoreStride * 4;
        int d = 0;
        for (; d + 64 <= d_pad; d += 64) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int g = 0; g < groups; ++g) {
                const Bf16* at = v[g] + d * 2;
                _tile_loadd(6, weights + g * kGroup, weight_bytes);
                _tile_loadd(7, at, v_bytes);
                _tile_dpbf16ps(0, 6, 7);
                _tile_loadd(7, at + 32, v_bytes);
                _tile_dpbf16ps(1, 6, 7);
                _tile_loadd(7, at + 64, v_bytes);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(7, at + 96, v_bytes);
                _tile_dpbf16ps(3, 6, 7);
            }
            _tile_stored(0, out + d, out_bytes);
            _tile_stored(1, out + d + 16, out_bytes);
            _tile_stored(2, out + d + 32, out_bytes);
            _tile_stored(3, out + d + 48, out_bytes);
        }
        if (d < d_pad) {
            _tile_zero(0);
            _tile_zero(1);
            for (int g = 0; g < groups; ++g) {
                const Bf16* at = v[g] + d * 2;
                _tile_loadd(6, weights + g * kGroup, weight_bytes);
                _tile_loadd(7, at, v_bytes);
                _tile_dpbf16ps(0, 6, 7);
                _tile_loadd(7, at + 32, v_bytes);
                _tile_dpbf16ps(1, 6, 7);
            }
            _tile_stored(0, out + d, out_bytes);
            _tile_stored(1, out + d + 16, out_bytes);
        }
    }
};

}  // namespace

const AttentionTable attention_bf16 = table_of<AmxMath>();

}  // namespace pf::amx
