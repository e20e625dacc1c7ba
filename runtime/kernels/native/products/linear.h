// Products with 16-bit matrices, and dequantization of all formats, written once over eight or sixteen lanes. Products of
// quantized matrices are in products/quantized.h. This file has no include guard: each targets/kernels_*.cpp includes it
// inside its own namespace, after lanes/eight_lanes.h.
//
// - Weight: a quantized weight is w = fma(scale, code, minimum), rounded once.
// - Algebra, per output row and token: acc = 0; for k = 0 .. K-1 in order: acc = fma(w_k, x_k, acc). There is one accumulator
//   per row and token, for any batch, so lanes are rows and never columns.
// - Bound: acc carries one rounding per column: |error| <= K 2^-24 sum |w_k| |x_k| to first order.
// - Accuracy class: bit-equal across instruction sets, thread counts and batches.
// - One token: 32 rows at once.
// - Several tokens: a panel of 16 rows x 256 columns is converted to floats once per 96 tokens, and multiplied with
//   kFloatTokens tokens at a time. The accumulators stay in memory between panels, which changes no bit.

constexpr int kVectorsPerBlock = kRowsPerBlock / kLanes;
constexpr int kPanelColumns = 256;  // a whole number of tiles in every format
constexpr int kChunkTokens = 96;

static_assert(kPanelColumns % kColumnsPerTile == 0 && kChunkTokens % kFloatTokens == 0, "panels and chunks hold whole tiles");

// Stands for a bitwidth in templates: 4-bit floats (E2M1). A level is twice the float plus 12, from 0 to 24.
constexpr int kMxfp4 = 44;
constexpr int kMxfp4Centre = 12;
alignas(16) constexpr uint8_t kMxfp4Levels[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Cache lines of a tile, at most.
constexpr int lines_of(int bitwidth) { return bitwidth == kMxfp4 || bitwidth == kTernary ? 4 : bitwidth; }

// Tiles of activations (32 columns) in one tile of codes.
constexpr int parts_of(int bitwidth) { return bitwidth == kTernary ? 2 : 1; }

// Bits of a code that stand in the first planes of a tile. Planes with the other bits follow (3, 5 and 6 bits).
constexpr int low_bits_of(int bitwidth) { return bitwidth == 3 ? 2 : bitwidth == 5 || bitwidth == 6 ? 4 : bitwidth; }

// Where the high bits of the codes of 4 Quad to 4 Quad + 3 are: plane of the tile, distance to their place in a code, and mask.
template <int Bitwidth, int Quad>
struct HighBits {
    static constexpr int kLow = low_bits_of(Bitwidth), kHigh = Bitwidth - kLow, kQuadsPerPlane = 8 / kHigh;
    static constexpr int kPlane = kLow + Quad / kQuadsPerPlane, kShift = kHigh * (Quad % kQuadsPerPlane) - kLow;
    static constexpr uint32_t kMask = ((1u << kHigh) - 1) << kLow;
};

// Shift right, or left if Count is negative.
template <int Count>
MOEC_INLINE Ints shift_either(Ints a) {
    if constexpr (Count >= 0) {
        return shift_right<Count>(a);
    } else {
        return shift_left<-Count>(a);
    }
}

// The code of the weight 0, in symmetric formats.
constexpr int centre_of(int bitwidth) { return bitwidth == kTernary ? 1 : 1 << (bitwidth - 1); }

// Codes of a three-valued format: kLanes rows, columns 4 Quad to 4 Quad + 3 of a tile, one byte each.
// Vector: which vector of the row block.
// A byte of a plane is a fraction of 256 whose base-3 digits are five codes. Three times the fraction is one code (the whole
// part) and the fraction that holds the codes after it.
template <int Quad, int Vector>
MOEC_INLINE Ints ternary_quad(const uint8_t* tile) {
    constexpr int kPlane = Quad / kTernaryDigits;
    if constexpr (kPlane == kTernaryPlanes) {  // one byte per row, two bits per column
        const Ints row = load_bytes(tile + kPlane * kPlaneBytes + Vector * kLanes);
        const Ints pair = either(row, shift_left<12>(row));
        return mask(either(pair, shift_left<6>(pair)), 0x03030303u);
    } else {
        Ints fractions = as_fractions(load_lanes(tile + kPlane * kPlaneBytes + Vector * (kPlaneBytes / kVectorsPerBlock)));
        unroll<Quad % kTernaryDigits>([&](auto) MOEC_INLINE_LAMBDA { fractions = without_digits(fractions); });
        return digits_of(fractions);
    }
}

// Codes of kLanes rows in column 4 Quad + Column of a tile. Vector: which vector of the row block.
template <int Bitwidth, int Quad, int Column, int Vector>
MOEC_INLINE Ints code_of(const uint8_t* tile) {
    constexpr int kByte = 8 * Column;
    const uint8_t* lanes = tile + Vector * (kPlaneBytes / kVectorsPerBlock);
    if constexpr (Bitwidth == kMxfp4) {
        return mask(look_up(kMxfp4Levels, code_of<4, Quad, Column, Vector>(tile)), 255);
    } else if constexpr (Bitwidth == kTernary) {
        return mask(shift_right<kByte>(ternary_quad<Quad, Vector>(tile)), 255);
    } else if constexpr (low_bits_of(Bitwidth) != Bitwidth) {
        using High = HighBits<Bitwidth, Quad>;
        const Ints plane = load_lanes(lanes + High::kPlane * kPlaneBytes);
        return either(code_of<High::kLow, Quad, Column, Vector>(tile), mask(shift_either<kByte + High::kShift>(plane), High::kMask));
    } else {
        constexpr int kQuadsPerPlane = 8 / Bitwidth;
        const Ints plane = load_lanes(lanes + Quad / kQuadsPerPlane * kPlaneBytes);
        return mask(shift_right<kByte + Bitwidth * (Quad % kQuadsPerPlane)>(plane), (1u << Bitwidth) - 1);
    }
}

// Walks the tiles of a row block, left to right.
struct TileCursor {
    const uint8_t* block;
    const uint8_t* group;
    int64_t tile_in_group, tiles_per_group, bytes_per_group, header_bytes, bytes_per_tile;
};

// column: the first column of a tile.
inline TileCursor tiles_of(const MatrixView& matrix, int64_t block, int64_t column) {
    TileCursor cursor;
    const int64_t first_tile = column / tile_columns(matrix);
    cursor.tiles_per_group = group_columns(matrix) / tile_columns(matrix);
    cursor.bytes_per_group = group_bytes(matrix);
    cursor.header_bytes = group_header_bytes(matrix);
    cursor.bytes_per_tile = tile_bytes(matrix);
    cursor.tile_in_group = first_tile % cursor.tiles_per_group;
    cursor.block = matrix.data + block * block_bytes(matrix);
    cursor.group = cursor.block + block_header_bytes(matrix) + first_tile / cursor.tiles_per_group * cursor.bytes_per_group;
    return cursor;
}

inline const uint8_t* tile_at(const TileCursor& cursor) {
    return cursor.group + cursor.header_bytes + cursor.tile_in_group * cursor.bytes_per_tile;
}

inline void advance(TileCursor& cursor) {
    if (++cursor.tile_in_group == cursor.tiles_per_group) {
        cursor.tile_in_group = 0;
        cursor.group += cursor.bytes_per_group;
    }
}

// For the rows of a block, the powers of two that bytes of scales and minima are multiplied with; those of minima are negative.
struct RowSteps {
    Floats scale[kVectorsPerBlock], minimum[kVectorsPerBlock];
};

template <bool HasByteScales>
MOEC_INLINE RowSteps load_steps(const uint8_t* block) {
    RowSteps steps{};
    if constexpr (HasByteScales) {
        unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            const Ints minimum = shift_left<23>(load_bytes(block + kRowsPerBlock + V * kLanes));
            steps.scale[V] = float_of(shift_left<23>(load_bytes(block + V * kLanes)));
            steps.minimum[V] = float_of(either(broadcast_int(0x80000000u), minimum));
        });
    }
    return steps;
}

template <int Bitwidth, bool IsSymmetric, bool HasByteScales>
MOEC_INLINE void load_scales(const uint8_t* group, const RowSteps& steps, Floats* scale, Floats* minimum) {
    unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
        constexpr int V = decltype(v)::value;
        if constexpr (Bitwidth == kMxfp4) {  // half of the power of two, because levels are twice the floats
            scale[V] = float_of(shift_left<23>(sub_int(load_bytes(group + V * kLanes), broadcast_int(1))));
            minimum[V] = mul(scale[V], broadcast(-static_cast<float>(kMxfp4Centre)));
        } else if constexpr (HasByteScales) {
            scale[V] = mul(steps.scale[V], to_float(load_bytes(group + V * kLanes)));  // exact
            minimum[V] = mul(steps.minimum[V], to_float(load_bytes(group + kRowsPerBlock + V * kLanes)));
        } else if constexpr (IsSymmetric) {
            scale[V] = load_half(group + V * 2 * kLanes);
            minimum[V] = mul(scale[V], broadcast(-static_cast<float>(centre_of(Bitwidth))));
        } else {
            scale[V] = load_half(group + V * 2 * kLanes);
            minimum[V] = load_half(group + kScaleBytes + V * 2 * kLanes);
        }
    });
}

template <bool IsHalf>
MOEC_INLINE Floats load_16_bit(const uint8_t* p) {
    if constexpr (IsHalf) {
        return load_half(p);
    } else {
        return load_bfloat(p);
    }
}

// Blocks x 16 rows times one vector. acc: [Blocks, 16], written.
template <bool IsHalf, int Blocks>
void multiply_vector_16_bit(const MatrixView& matrix, int64_t block, const float* x, float* acc) {
    constexpr int kVectors = Blocks * kVectorsPerBlock;
    const int64_t distance = block_bytes(matrix);
    const uint8_t* values = matrix.data + block * distance;
    Floats sum[kVectors];
    unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA { sum[decltype(v)::value] = zero(); });
    for (int64_t k = 0; k < matrix.columns; ++k, values += 2 * kRowsPerBlock) {
        const Floats input = broadcast(x[k]);
        unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            const uint8_t* p = values + V / kVectorsPerBlock * distance + V % kVectorsPerBlock * 2 * kLanes;
            sum[V] = fma(load_16_bit<IsHalf>(p), input, sum[V]);
        });
    }
    unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA { store(acc + decltype(v)::value * kLanes, sum[decltype(v)::value]); });
}

// Columns [k, k + count) of one row block as floats. k: a multiple of 256. panel: [count, 16], written.
template <int Bitwidth, bool IsSymmetric, bool HasByteScales = false>
void dequantize_panel_quantized(const MatrixView& matrix, int64_t block, int64_t k, int64_t count, float* panel) {
    constexpr int kColumns = parts_of(Bitwidth) * kColumnsPerTile;
    TileCursor cursor = tiles_of(matrix, block, k);
    Floats scale[kVectorsPerBlock], minimum[kVectorsPerBlock];
    const RowSteps steps = load_steps<HasByteScales>(cursor.block);
    for (int64_t done = 0; done < count; done += kColumns, advance(cursor), panel += kColumns * kRowsPerBlock) {
        load_scales<Bitwidth, IsSymmetric, HasByteScales>(cursor.group, steps, scale, minimum);
        const uint8_t* tile = tile_at(cursor);
        unroll<kColumns>([&](auto column) MOEC_INLINE_LAMBDA {
            constexpr int C = decltype(column)::value;
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                const Ints code = code_of<Bitwidth, C / kColumnsPerLane, C % kColumnsPerLane, V>(tile);
                store(panel + C * kRowsPerBlock + V * kLanes, fma(scale[V], to_float(code), minimum[V]));
            });
        });
    }
}

template <bool IsHalf>
void dequantize_panel_16_bit(const MatrixView& matrix, int64_t block, int64_t k, int64_t count, float* panel) {
    const uint8_t* values = matrix.data + block * block_bytes(matrix) + k * 2 * kRowsPerBlock;
    for (int64_t i = 0; i < count * kVectorsPerBlock; ++i) {
        store(panel + i * kLanes, load_16_bit<IsHalf>(values + i * 2 * kLanes));
    }
}

using MultiplyVector = void (*)(const MatrixView&, int64_t block, const float* x, float* acc);
using DequantizePanel = void (*)(const MatrixView&, int64_t block, int64_t k, int64_t count, float* panel);

// The functions of one 16-bit format, looked up once per call.
struct FloatFormat {
    MultiplyVector multiply_pair, multiply_single;
    DequantizePanel dequantize_panel;
};

template <bool IsHalf>
FloatFormat make_float_format() {
    return {multiply_vector_16_bit<IsHalf, kPairedBlocks>, multiply_vector_16_bit<IsHalf, 1>, dequantize_panel_16_bit<IsHalf>};
}

inline FloatFormat float_format_of(const MatrixView& matrix) {
    return matrix.float_type == FloatType::kFloat16 ? make_float_format<true>() : make_float_format<false>();
}

template <int Bitwidth>
DequantizePanel quantized_panel(const MatrixView& matrix) {
    if constexpr (Bitwidth <= kMaxByteScalesBits) {
        if (matrix.has_byte_scales) {
            return dequantize_panel_quantized<Bitwidth, false, true>;
        }
    }
    if constexpr (Bitwidth > 1) {
        if (matrix.is_symmetric) {
            return dequantize_panel_quantized<Bitwidth, true>;
        }
    }
    return dequantize_panel_quantized<Bitwidth, false>;
}

inline DequantizePanel panel_of(const MatrixView& matrix) {
    if (matrix.float_type == FloatType::kMxfp4) {
        return dequantize_panel_quantized<kMxfp4, false>;
    }
    switch (matrix.bitwidth) {
        case 1:
            return quantized_panel<1>(matrix);
        case kTernary:
            return dequantize_panel_quantized<kTernary, true>;
        case 2:
            return quantized_panel<2>(matrix);
        case 3:
            return quantized_panel<3>(matrix);
        case 4:
            return quantized_panel<4>(matrix);
        case 5:
            return quantized_panel<5>(matrix);
        case 6:
            return quantized_panel<6>(matrix);
        case 8:
            return quantized_panel<8>(matrix);
        default:
            return float_format_of(matrix).dequantize_panel;
    }
}

inline const float* row_of(const InputRows& rows, int64_t i) {
    return rows.base + (rows.index != nullptr ? rows.index[i] : i) * rows.stride;
}

inline float* row_of(const OutputRows& rows, int64_t i) {
    return rows.base + (rows.index != nullptr ? rows.index[i] : i) * rows.stride;
}

// panel: [count, 16]; x: Tokens rows, beginning with column k; acc: [Tokens, 16], read and written.
template <int Tokens>
void multiply_panel(const float* panel, int64_t count, const float* const* x, float* acc) {
    Floats sum[Tokens][kVectorsPerBlock];
    const float* input[Tokens];
    unroll<Tokens>([&](auto t) MOEC_INLINE_LAMBDA {
        constexpr int I = decltype(t)::value;
        input[I] = x[I];
        unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            sum[I][V] = load(acc + I * kRowsPerBlock + V * kLanes);
        });
    });
    for (int64_t k = 0; k < count; ++k, panel += kRowsPerBlock) {
        Floats weights[kVectorsPerBlock];
        unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            weights[V] = load(panel + V * kLanes);
        });
        unroll<Tokens>([&](auto t) MOEC_INLINE_LAMBDA {
            constexpr int I = decltype(t)::value;
            const Floats value = broadcast(input[I][k]);
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                sum[I][V] = fma(weights[V], value, sum[I][V]);
            });
        });
    }
    unroll<Tokens>([&](auto t) MOEC_INLINE_LAMBDA {
        constexpr int I = decltype(t)::value;
        unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            store(acc + I * kRowsPerBlock + V * kLanes, sum[I][V]);
        });
    });
}

using MultiplyPanel = void (*)(const float*, int64_t, const float* const*, float*);

// multiply_panel for 1 to kFloatTokens tokens.
struct PanelByTokens {
    MultiplyPanel of[kFloatTokens + 1];
};

inline PanelByTokens make_panels() {
    PanelByTokens panels{};
    unroll<kFloatTokens>([&](auto i) MOEC_INLINE_LAMBDA {
        panels.of[decltype(i)::value + 1] = multiply_panel<decltype(i)::value + 1>;
    });
    return panels;
}

// One row block times `count` <= 96 tokens, beginning with token `first`. acc: [count, 16], written.
inline void multiply_block(const MatrixView& matrix, const FloatFormat& format, int64_t block, const InputRows& x,
                           int64_t first, int count, float* acc) {
    const PanelByTokens panels = make_panels();
    alignas(64) float panel[kPanelColumns * kRowsPerBlock];
    for (int i = 0; i < count * kVectorsPerBlock; ++i) {
        store(acc + i * kLanes, zero());
    }
    const int tiles = (count + kFloatTokens - 1) / kFloatTokens;
    for (int64_t k = 0; k < matrix.columns; k += kPanelColumns) {
        const int64_t columns = matrix.columns - k < kPanelColumns ? matrix.columns - k : kPanelColumns;
        format.dequantize_panel(matrix, block, k, columns, panel);
        int token = 0;
        for (int tile = 0; tile < tiles; ++tile) {  // of nearly equal size: a tile of one token would wait for its fma
            const int tokens = (count - token + tiles - tile - 1) / (tiles - tile);
            const float* inputs[kFloatTokens];
            for (int i = 0; i < tokens; ++i) {
                inputs[i] = row_of(x, first + token + i) + k;
            }
            panels.of[tokens](panel, columns, inputs, acc + token * kRowsPerBlock);
            token += tokens;
        }
    }
}
