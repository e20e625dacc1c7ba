// Products with packed matrices, written once over eight lanes. Included inside the namespace of an instruction set, after
// its lane operations; no include guard, for that reason.
//
// Algebra, per output row and token: acc = 0; for k = 0 .. K-1 in order: w = fma(scale, code, minimum) (16-bit: the value),
// acc = fma(w, x_k, acc). One accumulator per row and token, whatever the batch, so lanes are rows and never columns.
// Bound: w carries one rounding, acc one per column: |error| <= (K + 1) 2^-24 sum |w_k| |x_k| to first order.
// Accuracy class: bit-equal across instruction sets, thread counts and batches.
// One token: 32 rows at once, straight from the codes. More: a panel of 16 rows x 256 columns is dequantized once per
// 96 tokens and multiplied by 6 tokens at a time; the accumulators rest in memory between panels, which changes no bit.

constexpr int kVectorsPerBlock = kRowsPerBlock / kLanes;
constexpr int kPanelColumns = 256;
constexpr int kTileTokens = 6;
constexpr int kChunkTokens = 96;

static_assert(kPanelColumns % kColumnsPerTile == 0 && kChunkTokens % kTileTokens == 0, "panels and chunks hold whole tiles");

template <int Value>
struct Index {
    static constexpr int value = Value;
};

template <int Count, int First = 0, class Body>
MOEC_INLINE void unroll(const Body& body) {
    if constexpr (First < Count) {
        body(Index<First>{});
        unroll<Count, First + 1>(body);
    }
}

// Codes of eight rows in column 4 Quad + Column of a tile. lanes: the tile, plus 32 bytes for rows 8 to 15.
template <int Bitwidth, int Quad, int Column>
MOEC_INLINE Ints code_of(const uint8_t* lanes) {
    constexpr int kByte = 8 * Column;
    if constexpr (Bitwidth == 3) {
        const Ints low = code_of<2, Quad, Column>(lanes);
        const Ints plane = load_lanes(lanes + 2 * kPlaneBytes);
        constexpr int kShift = kByte + Quad - 2;  // brings the high bit to bit 2
        if constexpr (kShift >= 0) {
            return either(low, mask(shift_right<kShift>(plane), 4));
        } else {
            return either(low, mask(shift_left<-kShift>(plane), 4));
        }
    } else {
        constexpr int kQuadsPerPlane = 8 / Bitwidth;
        const Ints plane = load_lanes(lanes + Quad / kQuadsPerPlane * kPlaneBytes);
        return mask(shift_right<kByte + Bitwidth * (Quad % kQuadsPerPlane)>(plane), (1u << Bitwidth) - 1);
    }
}

// Walks the tiles of a row block, left to right.
struct TileCursor {
    const uint8_t* group;
    int64_t tile_in_group, tiles_per_group, bytes_per_group, header_bytes, bytes_per_tile;
};

inline TileCursor tiles_of(const MatrixView& matrix, int64_t block, int64_t first_tile) {
    TileCursor cursor;
    cursor.tiles_per_group = group_columns(matrix) / kColumnsPerTile;
    cursor.bytes_per_group = group_bytes(matrix);
    cursor.header_bytes = group_header_bytes(matrix);
    cursor.bytes_per_tile = int64_t{kPlaneBytes} * matrix.bitwidth;
    cursor.tile_in_group = first_tile % cursor.tiles_per_group;
    cursor.group = matrix.data + block * block_bytes(matrix) + first_tile / cursor.tiles_per_group * cursor.bytes_per_group;
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

template <int Bitwidth, bool IsSymmetric>
MOEC_INLINE void load_scales(const uint8_t* group, Floats* scale, Floats* minimum) {
    unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
        constexpr int V = decltype(v)::value;
        scale[V] = load_half(group + V * 2 * kLanes);
        if constexpr (IsSymmetric) {
            minimum[V] = mul(scale[V], broadcast(-static_cast<float>(1 << (Bitwidth - 1))));
        } else {
            minimum[V] = load_half(group + kScaleBytes + V * 2 * kLanes);
        }
    });
}

// Blocks x 16 rows times one vector. acc: [Blocks, 16], written.
template <int Bitwidth, bool IsSymmetric, int Blocks>
void multiply_vector_quantized(const MatrixView& matrix, int64_t block, const float* x, float* acc) {
    constexpr int kVectors = Blocks * kVectorsPerBlock;
    const int64_t distance = block_bytes(matrix);
    Floats sum[kVectors], scale[kVectors], minimum[kVectors];
    unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA { sum[decltype(v)::value] = zero(); });
    TileCursor cursor = tiles_of(matrix, block, 0);
    for (int64_t k = 0; k < matrix.columns; k += kColumnsPerTile, advance(cursor)) {
        unroll<Blocks>([&](auto b) MOEC_INLINE_LAMBDA {
            constexpr int B = decltype(b)::value;
            load_scales<Bitwidth, IsSymmetric>(cursor.group + B * distance, scale + B * kVectorsPerBlock,
                                               minimum + B * kVectorsPerBlock);
        });
        const uint8_t* tile = tile_at(cursor);
        unroll<kColumnsPerTile>([&](auto column) MOEC_INLINE_LAMBDA {
            constexpr int C = decltype(column)::value;
            const Floats input = broadcast(x[k + C]);
            unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                const uint8_t* lanes = tile + V / kVectorsPerBlock * distance + V % kVectorsPerBlock * (kPlaneBytes / 2);
                const Ints code = code_of<Bitwidth, C / kColumnsPerLane, C % kColumnsPerLane>(lanes);
                sum[V] = fma(fma(scale[V], to_float(code), minimum[V]), input, sum[V]);
            });
        });
    }
    unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA { store(acc + decltype(v)::value * kLanes, sum[decltype(v)::value]); });
}

template <bool IsHalf>
MOEC_INLINE Floats load_16_bit(const uint8_t* p) {
    if constexpr (IsHalf) {
        return load_half(p);
    } else {
        return load_bfloat(p);
    }
}

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

// Columns [k, k + count) of one block as floats. k: a multiple of 256. panel: [count, 16], written.
template <int Bitwidth, bool IsSymmetric>
void dequantize_panel_quantized(const MatrixView& matrix, int64_t block, int64_t k, int64_t count, float* panel) {
    TileCursor cursor = tiles_of(matrix, block, k / kColumnsPerTile);
    Floats scale[kVectorsPerBlock], minimum[kVectorsPerBlock];
    for (int64_t done = 0; done < count; done += kColumnsPerTile, advance(cursor), panel += kColumnsPerTile * kRowsPerBlock) {
        load_scales<Bitwidth, IsSymmetric>(cursor.group, scale, minimum);
        const uint8_t* tile = tile_at(cursor);
        unroll<kColumnsPerTile>([&](auto column) MOEC_INLINE_LAMBDA {
            constexpr int C = decltype(column)::value;
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                const Ints code = code_of<Bitwidth, C / kColumnsPerLane, C % kColumnsPerLane>(tile + V * (kPlaneBytes / 2));
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

// The routines of one format, found once per call.
struct Format {
    MultiplyVector multiply_pair, multiply_single;
    DequantizePanel dequantize_panel;
};

template <int Bitwidth>
Format quantized_format(bool is_symmetric) {
    if (is_symmetric) {
        return {multiply_vector_quantized<Bitwidth, true, kPairedBlocks>, multiply_vector_quantized<Bitwidth, true, 1>,
                dequantize_panel_quantized<Bitwidth, true>};
    }
    return {multiply_vector_quantized<Bitwidth, false, kPairedBlocks>, multiply_vector_quantized<Bitwidth, false, 1>,
            dequantize_panel_quantized<Bitwidth, false>};
}

template <bool IsHalf>
Format float_format() {
    return {multiply_vector_16_bit<IsHalf, kPairedBlocks>, multiply_vector_16_bit<IsHalf, 1>, dequantize_panel_16_bit<IsHalf>};
}

inline Format format_of(const MatrixView& matrix) {
    switch (matrix.bitwidth) {
        case 2:
            return quantized_format<2>(matrix.is_symmetric);
        case 3:
            return quantized_format<3>(matrix.is_symmetric);
        case 4:
            return quantized_format<4>(matrix.is_symmetric);
        case 8:
            return quantized_format<8>(matrix.is_symmetric);
        default:
            return matrix.float_type == FloatType::kFloat16 ? float_format<true>() : float_format<false>();
    }
}

inline const float* row_of(const InputRows& rows, int64_t i) {
    return rows.base + (rows.index != nullptr ? rows.index[i] : i) * rows.stride;
}

inline float* row_of(const OutputRows& rows, int64_t i) {
    return rows.base + (rows.index != nullptr ? rows.index[i] : i) * rows.stride;
}

// panel: [count, 16]; x: Tokens rows, from column k on; acc: [Tokens, 16], read and written.
template <int Tokens>
void multiply_panel(const float* panel, int64_t count, const float* const* x, float* acc) {
    Floats sum[Tokens][kVectorsPerBlock];
    const float* input[Tokens];
    unroll<Tokens>([&](auto t) MOEC_INLINE_LAMBDA {
        constexpr int I = decltype(t)::value;
        input[I] = x[I];
        sum[I][0] = load(acc + I * kRowsPerBlock);
        sum[I][1] = load(acc + I * kRowsPerBlock + kLanes);
    });
    for (int64_t k = 0; k < count; ++k, panel += kRowsPerBlock) {
        const Floats low = load(panel), high = load(panel + kLanes);
        unroll<Tokens>([&](auto t) MOEC_INLINE_LAMBDA {
            constexpr int I = decltype(t)::value;
            const Floats value = broadcast(input[I][k]);
            sum[I][0] = fma(low, value, sum[I][0]);
            sum[I][1] = fma(high, value, sum[I][1]);
        });
    }
    unroll<Tokens>([&](auto t) MOEC_INLINE_LAMBDA {
        constexpr int I = decltype(t)::value;
        store(acc + I * kRowsPerBlock, sum[I][0]);
        store(acc + I * kRowsPerBlock + kLanes, sum[I][1]);
    });
}

using MultiplyPanel = void (*)(const float*, int64_t, const float* const*, float*);

// One row block times `count` <= 96 tokens from `first` on. acc: [count, 16], written.
inline void multiply_block(const MatrixView& matrix, const Format& format, int64_t block, const InputRows& x, int64_t first,
                           int count, float* acc) {
    static constexpr MultiplyPanel kByTokens[kTileTokens + 1] = {nullptr,           multiply_panel<1>, multiply_panel<2>,
                                                                 multiply_panel<3>, multiply_panel<4>, multiply_panel<5>,
                                                                 multiply_panel<6>};
    alignas(64) float panel[kPanelColumns * kRowsPerBlock];
    for (int i = 0; i < count * kVectorsPerBlock; ++i) {
        store(acc + i * kLanes, zero());
    }
    const int tiles = (count + kTileTokens - 1) / kTileTokens;
    for (int64_t k = 0; k < matrix.columns; k += kPanelColumns) {
        const int64_t columns = matrix.columns - k < kPanelColumns ? matrix.columns - k : kPanelColumns;
        format.dequantize_panel(matrix, block, k, columns, panel);
        int token = 0;
        for (int tile = 0; tile < tiles; ++tile) {  // of nearly equal size: a tile of one token would wait for itself
            const int tokens = (count - token + tiles - tile - 1) / (tiles - tile);
            const float* inputs[kTileTokens];
            for (int i = 0; i < tokens; ++i) {
                inputs[i] = row_of(x, first + token + i) + k;
            }
            kByTokens[tokens](panel, columns, inputs, acc + token * kRowsPerBlock);
            token += tokens;
        }
    }
}

// The first `rows` <= 16 lanes of acc to out.
inline void store_rows(float* out, const float* acc, int64_t rows) {
    for (int64_t row = 0; row < rows; row += kLanes) {
        const int count = static_cast<int>(rows - row < kLanes ? rows - row : kLanes);
        store_partial(out + row, load(acc + row), count);
    }
}

inline int64_t rows_in_block(const MatrixView& matrix, int64_t block) {
    const int64_t rest = matrix.rows - block * kRowsPerBlock;
    return rest < kRowsPerBlock ? rest : kRowsPerBlock;
}

// Blocks from `block` on that one step over one token takes: 2, or 1 at the end.
inline int blocks_in_step(int64_t block, int64_t end) {
    return end - block >= kPairedBlocks ? kPairedBlocks : 1;
}

inline void multiply_step(const MatrixView& matrix, const Format& format, int64_t block, int blocks, const float* x, float* acc) {
    (blocks == kPairedBlocks ? format.multiply_pair : format.multiply_single)(matrix, block, x, acc);
}

inline void linear(const MatrixView& matrix, InputRows x, int64_t tokens, OutputRows out, int64_t begin, int64_t end) {
    const Format format = format_of(matrix);
    alignas(64) float acc[kChunkTokens * kRowsPerBlock];
    if (tokens == 1) {
        for (int64_t block = begin; block < end; block += kPairedBlocks) {
            const int blocks = blocks_in_step(block, end);
            multiply_step(matrix, format, block, blocks, row_of(x, 0), acc);
            for (int b = 0; b < blocks; ++b) {
                store_rows(row_of(out, 0) + (block + b) * kRowsPerBlock, acc + b * kRowsPerBlock, rows_in_block(matrix, block + b));
            }
        }
        return;
    }
    for (int64_t first = 0; first < tokens; first += kChunkTokens) {
        const int count = static_cast<int>(tokens - first < kChunkTokens ? tokens - first : kChunkTokens);
        for (int64_t block = begin; block < end; ++block) {
            multiply_block(matrix, format, block, x, first, count, acc);
            for (int i = 0; i < count; ++i) {
                store_rows(row_of(out, first + i) + block * kRowsPerBlock, acc + i * kRowsPerBlock, rows_in_block(matrix, block));
            }
        }
    }
}

inline void dequantize_row(const MatrixView& matrix, int64_t row, float* out) {
    const Format format = format_of(matrix);
    alignas(64) float panel[kPanelColumns * kRowsPerBlock];
    for (int64_t k = 0; k < matrix.columns; k += kPanelColumns) {
        const int64_t columns = matrix.columns - k < kPanelColumns ? matrix.columns - k : kPanelColumns;
        format.dequantize_panel(matrix, row / kRowsPerBlock, k, columns, panel);
        for (int64_t i = 0; i < columns; ++i) {
            out[k + i] = panel[i * kRowsPerBlock + row % kRowsPerBlock];
        }
    }
}
