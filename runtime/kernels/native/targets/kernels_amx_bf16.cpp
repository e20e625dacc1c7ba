// Products with activations rounded to bfloat16, in the tile registers of AMX. They serve the kernels of AMX;
// targets/choose_kernels.cpp says when.
//
// Only this file is compiled with AMX for bfloat16 (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must
// have internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/compilers.h"
#include "targets/kernel_table.h"

#if defined(MOEC_EMULATE_VNNI) || \
    ((defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__) && defined(__GNUC__))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moec {
namespace amx_bf16 {
namespace {

#include "lanes/unroll.h"
#if defined(MOEC_EMULATE_VNNI)  // for tests on processors without it: loops over sixteen numbers, and tiles in memory
#include "emulated_bfloat_lanes.h"
#include "emulated_amx_tiles.h"
#else
#include "lanes/bfloat_lanes.h"
#include "lanes/amx_tiles.h"
#endif

// - Algebra, per output row and token: acc = 0; for each tile of 32 columns in order: even = odd = 0; for the pairs of columns
//   2 j and 2 j + 1 of the tile in order: even = fma(w_2j, x'_2j, even); odd = fma(w_2j+1, x'_2j+1, odd);
//   then acc = acc + (even + odd). Missing columns count as zeros. Rounding and subnormal numbers: kernels_avx512bf16.cpp.
//   Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.
// - Bound: as in kernels_avx512bf16.cpp, with n = K / 32 + 18 in its first term and 34 per tile in its last one.
// - Accuracy class: the same bits for any batch and any number of threads; not those of AVX-512 BF16.
// - The sums of up to 96 tokens stay in six tiles while one tile of weights after the other is multiplied.

constexpr int kMostGroups = 6, kInputs = 6, kWeights = 7;  // tiles 0 to 5 are sums
constexpr int kPairsPerTile = kColumnsPerTile / 2;
constexpr int kTileValues = kRowsPerBlock * kColumnsPerTile;
constexpr int kPanelTiles = 8;  // tiles of weights that are brought into the order of pairs at once

// Sets the shapes of the tile registers, and afterwards those from before: the caller may multiply bytes in tiles.
class BorrowedTiles {
  public:
    explicit BorrowedTiles(int rows) {
        keep_tile_shapes(&before_);
        TileShapes shapes;
        for (int group = 0; group < kMostGroups; ++group) {
            shapes.set(group, rows, kPlaneBytes);
        }
        shapes.set(kInputs, rows, kPlaneBytes);
        shapes.set(kWeights, kPairsPerTile, kPlaneBytes);
        configure_tiles(shapes);
    }
    BorrowedTiles(const BorrowedTiles&) = delete;
    BorrowedTiles& operator=(const BorrowedTiles&) = delete;
    ~BorrowedTiles() { configure_tiles(before_); }

  private:
    TileShapes before_;
};

// Bring up to kPanelTiles tiles of a row block, from column k on, into the order [tile][pair][row][2], with zeros at the end.
inline void order_pairs(const uint8_t* block, int64_t k, int64_t columns, int64_t tiles, uint16_t* panel) {
    for (int64_t pair = 0; pair < tiles * kPairsPerTile; ++pair, k += 2, panel += 2 * kRowsPerBlock) {
        const uint8_t* column = block + k * 2 * kRowsPerBlock;
        if (k + 1 < columns) {
            store_pairs(panel, load_columns(column));
        } else if (k < columns) {
            store_pairs(panel, load_last_column(column));
        } else {
            std::memset(panel, 0, 2 * kRowsPerBlock * sizeof(uint16_t));
        }
    }
}

// One row block times Groups groups of rows. x: first tile of the first group; groups are group_distance values apart.
template <int Groups>
void multiply_tiles(const uint8_t* block, int64_t columns, const uint16_t* x, int64_t tile_distance, int64_t group_distance,
                    float* sums) {
    alignas(64) uint16_t panel[kPanelTiles * kTileValues];
    const int64_t tiles = bfloat_tiles(columns);
    unroll<Groups>([&](auto g) MOEC_INLINE_LAMBDA { tile_zero<decltype(g)::value>(); });
    for (int64_t first = 0; first < tiles; first += kPanelTiles) {
        const int64_t some = tiles - first < kPanelTiles ? tiles - first : kPanelTiles;
        order_pairs(block, first * kColumnsPerTile, columns, some, panel);
        for (int64_t t = 0; t < some; ++t, x += tile_distance) {
            tile_load<kWeights>(panel + t * kTileValues, kPlaneBytes);
            unroll<Groups>([&](auto g) MOEC_INLINE_LAMBDA {
                constexpr int G = decltype(g)::value;
                tile_load<kInputs>(x + G * group_distance, kPlaneBytes);
                tile_multiply_bfloats<G, kInputs, kWeights>();
            });
        }
    }
    unroll<Groups>([&](auto g) MOEC_INLINE_LAMBDA {
        constexpr int G = decltype(g)::value;
        tile_store<G>(sums + G * kRowsSideBySide * kRowsPerBlock, kPlaneBytes);
    });
}

using MultiplyTiles = void (*)(const uint8_t*, int64_t, const uint16_t*, int64_t, int64_t, float*);

// multiply_tiles for 1 to kMostGroups groups.
struct TilesByGroups {
    MultiplyTiles of[kMostGroups + 1];
};

inline TilesByGroups make_tiles() {
    TilesByGroups found{};
    unroll<kMostGroups>([&](auto i) MOEC_INLINE_LAMBDA {
        found.of[decltype(i)::value + 1] = multiply_tiles<decltype(i)::value + 1>;
    });
    return found;
}

// See MultiplyBfloats in targets/kernel_table.h.
inline void multiply_bfloats(const MatrixView& matrix, int64_t block, int blocks, const BfloatRows& x, int64_t first, int count,
                             float* acc) {
    const TilesByGroups by_groups = make_tiles();
    const int rows = static_cast<int>(x.side_by_side), groups = (count + rows - 1) / rows;
    const int64_t tile_distance = rows * kColumnsPerTile, group_distance = bfloat_tiles(x.columns) * tile_distance;
    alignas(64) float sums[kMostGroups * kRowsSideBySide * kRowsPerBlock];
    const BorrowedTiles borrowed(rows);
    for (int b = 0; b < blocks; ++b) {
        by_groups.of[groups](matrix.data + (block + b) * block_bytes(matrix), matrix.columns,
                             x.values + first_value_of(x, first), tile_distance, group_distance, sums);
        std::memcpy(acc + b * int64_t{count} * kRowsPerBlock, sums, static_cast<size_t>(count) * kRowsPerBlock * sizeof(float));
    }
}


void round_row(const float* x, int64_t columns, uint16_t* values, int64_t distance) {
    avx512bf16_kernels()->round_row(x, columns, values, distance);
}

#if defined(MOEC_EMULATE_VNNI)
constexpr BfloatKernels kKernels{"amx-bf16", has_avx2, round_row, multiply_bfloats};
#else
constexpr BfloatKernels kKernels{"amx-bf16", has_amx_bf16, round_row, multiply_bfloats};
#endif

}  // namespace
}  // namespace amx_bf16

// Called on every x86 processor, so it must run no wide instruction: it returns the address of a constant.
const BfloatKernels* amx_bf16_kernels() {
    return &amx_bf16::kKernels;
}

}  // namespace moec

#else

namespace moec {

const BfloatKernels* amx_bf16_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
