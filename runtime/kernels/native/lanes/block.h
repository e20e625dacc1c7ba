// The bytes of the packed layout `rows16`. This is the only definition in C++; the specification is docs/format.md, Packing.
// A new format begins here: see README.md, last table.
//
// - A row block holds 16 rows.
// - Quantized: a row block is a sequence of groups. A group is 16 scales, 16 minima if asymmetric, and tiles of 16 rows x 32
//   columns. A plane of a tile has 64 bytes: one 32-bit lane per row, whose four bytes are four columns.
// - Scales in bytes: the row block begins with 16 exponents of scales and 16 of minima; groups have one byte per scale and
//   minimum.
// - 16-bit: a row block is a sequence of columns of 16 values.
// - Three values: a tile has 64 columns, in three planes and a quarter of one.
//
// Rows and columns are at most 2^24 and bits at most 16, so every size below fits in 53 bits.

#pragma once

#include <cstdint>

namespace moec {

constexpr int kRowsPerBlock = 16;
constexpr int kColumnsPerTile = 32;
constexpr int kColumnsPerLane = 4;
constexpr int kLanesPerTile = kColumnsPerTile / kColumnsPerLane;
constexpr int kPlaneBytes = 64;
constexpr int kScaleBytes = 2 * kRowsPerBlock;
constexpr int kMaxByteScalesBits = 5;  // formats of more bits have scales and minima in half precision
constexpr int64_t kMaxDimension = int64_t{1} << 24;

// Stands for a bitwidth. Codes are 0, 1 and 2; a byte has 3^5 values and holds five codes.
constexpr int kTernary = 243;
constexpr int kTernaryPlanes = 3;
constexpr int kTernaryDigits = 5;
constexpr int kTernaryTileBytes = kTernaryPlanes * kPlaneBytes + kRowsPerBlock;

template <int Bitwidth>
struct Tile {
    uint8_t planes[Bitwidth][kPlaneBytes];
};

static_assert(kPlaneBytes == kRowsPerBlock * kColumnsPerLane, "a plane is one byte per row and column of a lane");
static_assert(sizeof(Tile<2>) == 128 && sizeof(Tile<3>) == 192, "tile sizes of docs/format.md");
static_assert(sizeof(Tile<4>) == 256 && sizeof(Tile<5>) == 320, "tile sizes of docs/format.md");
static_assert(sizeof(Tile<6>) == 384 && sizeof(Tile<8>) == 512, "tile sizes of docs/format.md");
static_assert(kTernaryTileBytes == 208, "tile sizes of docs/format.md");
static_assert(kTernaryPlanes * kTernaryDigits + 1 == 2 * kLanesPerTile, "the sixteenth lane of a tile stands alone");
static_assert(sizeof(Tile<4>) * 8 == 4 * kRowsPerBlock * kColumnsPerTile, "a tile has no padding");

enum class FloatType : int { kNone = 0, kBfloat16 = 1, kFloat16 = 2, kMxfp4 = 3 };

// A packed matrix; the caller owns the memory. group_size 0: one group of all columns.
struct MatrixView {
    const uint8_t* data;
    int64_t rows;
    int64_t columns;
    int64_t group_size;
    int bitwidth;
    bool is_symmetric;
    FloatType float_type;
    bool has_byte_scales;  // scales and minima are bytes times powers of two, stored at the start of each row block
};

// All functions have internal linkage: each instruction set compiles its own copy, and the linker must not mix them.
static inline int64_t blocks_of(const MatrixView& matrix) {
    return (matrix.rows + kRowsPerBlock - 1) / kRowsPerBlock;
}

static inline int64_t group_columns(const MatrixView& matrix) {
    return matrix.group_size != 0 ? matrix.group_size : matrix.columns;
}

static inline int64_t group_header_bytes(const MatrixView& matrix) {
    if (matrix.float_type == FloatType::kMxfp4) {
        return kRowsPerBlock;  // exponents
    }
    return matrix.is_symmetric || matrix.has_byte_scales ? kScaleBytes : 2 * kScaleBytes;
}

static inline int64_t block_header_bytes(const MatrixView& matrix) {
    return matrix.has_byte_scales ? 2 * kRowsPerBlock : 0;
}

// Columns of a tile of codes: those of one tile of activations, or of two.
static inline int64_t tile_columns(const MatrixView& matrix) {
    return matrix.bitwidth == kTernary ? 2 * kColumnsPerTile : kColumnsPerTile;
}

static inline int64_t tile_bytes(const MatrixView& matrix) {
    return matrix.bitwidth == kTernary ? kTernaryTileBytes : int64_t{kPlaneBytes} * matrix.bitwidth;
}

static inline int64_t group_bytes(const MatrixView& matrix) {
    return group_header_bytes(matrix) + group_columns(matrix) / tile_columns(matrix) * tile_bytes(matrix);
}

static inline int64_t block_bytes(const MatrixView& matrix) {
    if (matrix.bitwidth == 16) {
        return matrix.columns * 2 * kRowsPerBlock;
    }
    return block_header_bytes(matrix) + matrix.columns / group_columns(matrix) * group_bytes(matrix);
}

static inline int64_t packed_bytes(const MatrixView& matrix) {
    return blocks_of(matrix) * block_bytes(matrix);
}

// Whether the fields describe a valid matrix. Call nothing else in this file before this returned true.
static inline bool is_valid(const MatrixView& matrix) {
    const bool is_16_bit = matrix.bitwidth == 16;
    if (matrix.rows < 1 || matrix.rows > kMaxDimension || matrix.columns < 1 || matrix.columns > kMaxDimension) {
        return false;
    }
    if (is_16_bit) {
        return matrix.group_size == 0 && !matrix.is_symmetric && !matrix.has_byte_scales &&
               (matrix.float_type == FloatType::kBfloat16 || matrix.float_type == FloatType::kFloat16);
    }
    const int bits = matrix.bitwidth;
    const bool is_known = (bits == 1 && !matrix.is_symmetric) || (bits == kTernary && matrix.is_symmetric) ||
                          (bits >= 2 && bits <= 6) || bits == 8;
    const bool is_group = matrix.group_size >= 0 && matrix.group_size % tile_columns(matrix) == 0 &&
                          matrix.columns % group_columns(matrix) == 0;
    const bool is_mxfp4 = matrix.float_type == FloatType::kMxfp4 && bits == 4 && matrix.group_size == kColumnsPerTile &&
                          !matrix.is_symmetric;
    const bool is_integer = matrix.float_type == FloatType::kNone;
    if (matrix.has_byte_scales && (matrix.is_symmetric || !is_integer || matrix.group_size == 0 || bits > kMaxByteScalesBits)) {
        return false;
    }
    return is_known && is_group && matrix.columns % tile_columns(matrix) == 0 && (is_mxfp4 || is_integer);
}

}  // namespace moec
