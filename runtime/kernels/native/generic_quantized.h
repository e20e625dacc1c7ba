// Products of quantized matrices with activations rounded to 8 bits, written once over eight lanes. Included inside the
// namespace of an instruction set, after generic_linear.h; no include guard, for that reason.
//
// Rounding, per row and tile of 32 columns: step = max |x| / 127, q_k = x_k * (127 / max |x|) to nearest even, all zero where
// max |x| < 2^-110. A tile that holds a value that is not finite has the step NaN.
// Algebra, per output row and token: acc = 0; for tiles in order: dot = sum code_k q_k (exact, 32-bit integers),
// acc = fma(step, fma(scale, dot, minimum * sum q_k), acc).
// Bound: |error| <= sum over tiles of step / 2 * sum |w_k|, and three roundings of the tile's terms, to first order.
// Accuracy class: bit-equal across instruction sets, thread counts and batches.
// One token: straight from the codes, one row block after the other, so that a matrix is a single stream of memory; lines are
// asked for kPrefetchBytes ahead, because the processor's own prefetching stops at every page. More tokens: the codes of
// 16 rows x 256 columns are brought to bytes once per 96 tokens and multiplied by 4 tokens at a time; the accumulators rest
// in memory between tiles, which changes no bit.

constexpr int kQuadsPerTile = kColumnsPerTile / kColumnsPerLane;
constexpr int kRoundedTileTokens = 4;
constexpr int kPrefetchBytes = 3072;  // 2 to 4 KiB measure alike on Zen 3; 1 KiB and 8 KiB lose up to a tenth
constexpr float kMostRounded = 127.0f;
constexpr float kSmallestRounded = 7.70371977754894341e-34f;  // 2^-110: 127 divided by less could overflow

// [columns] floats to codes, and step and sum of each tile. columns: a multiple of 32.
inline void round_row(const float* x, int64_t columns, int8_t* codes, float* steps, float* sums) {
    constexpr int kVectors = kColumnsPerTile / kLanes;
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the integer
    const Ints sign = broadcast_int(0x80000000u), lowest = bits_of(magic);
    for (int64_t tile = 0; tile < columns / kColumnsPerTile; ++tile, x += kColumnsPerTile, codes += kColumnsPerTile) {
        Floats most = zero(), strange = zero();  // strange: 0, or NaN
        unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
            const Floats value = load(x + decltype(v)::value * kLanes);
            strange = fma(value, zero(), strange);
            most = larger(float_of(without(bits_of(value), sign)), most);
        });
        const float largest = max_lanes(most) + sum_lanes(strange);
        const Floats inverse = broadcast(largest >= kSmallestRounded ? kMostRounded / largest : 0.0f);
        Ints total = broadcast_int(0);
        unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            // NaN becomes the bound: of two operands the second wins
            const Floats scaled = smaller(larger(mul(load(x + V * kLanes), inverse), broadcast(-kMostRounded)), broadcast(kMostRounded));
            const Ints rounded = sub_int(bits_of(add(scaled, magic)), lowest);
            total = add_int(total, rounded);
            store_low_bytes(codes + V * kLanes, rounded);
        });
        steps[tile] = largest / kMostRounded;
        sums[tile] = sum_lanes(to_float(total));
    }
}

// Codes of eight rows in columns 4 Quad to 4 Quad + 3 of a tile, a byte each. Vector: rows 0 to 7, or 8 to 15.
template <int Bitwidth, int Quad, int Vector>
MOEC_INLINE Ints quad_of(const uint8_t* tile) {
    constexpr uint32_t kEveryByte = 0x01010101u;
    const uint8_t* lanes = tile + Vector * (kPlaneBytes / kVectorsPerBlock);
    if constexpr (Bitwidth == kMxfp4) {
        return look_up(kMxfp4Levels, quad_of<4, Quad, Vector>(tile));
    } else if constexpr (Bitwidth == kTernary) {
        return ternary_quad<Quad, Vector>(tile);
    } else if constexpr (Bitwidth == 8) {
        return load_lanes(lanes + Quad * kPlaneBytes);
    } else if constexpr (Bitwidth == 3) {
        const Ints plane = load_lanes(lanes + 2 * kPlaneBytes);
        constexpr int kShift = Quad - 2;  // brings the high bit to bit 2
        if constexpr (kShift >= 0) {
            return either(quad_of<2, Quad, Vector>(tile), mask(shift_right<kShift>(plane), 4 * kEveryByte));
        } else {
            return either(quad_of<2, Quad, Vector>(tile), mask(shift_left<-kShift>(plane), 4 * kEveryByte));
        }
    } else {
        constexpr int kQuadsPerPlane = 8 / Bitwidth;
        constexpr uint32_t kMask = ((1u << Bitwidth) - 1) * kEveryByte;
        return mask(shift_right<Bitwidth * (Quad % kQuadsPerPlane)>(load_lanes(lanes + Quad / kQuadsPerPlane * kPlaneBytes)), kMask);
    }
}

// Sum over a tile of code * q, per row: `Products` of codes up to 15 may be narrow, of levels up to 24 over half a tile; codes
// of 8 bits are taken less 128.
template <int Bitwidth>
struct TileSum {
    Products narrow, second_half;
    Ints wide;
};

template <int Bitwidth>
MOEC_INLINE TileSum<Bitwidth> no_sum() {
    if constexpr (Bitwidth == 8) {
        return {Products{}, Products{}, broadcast_int(0)};
    } else {
        return {no_products(), no_products(), Ints{}};
    }
}

template <int Bitwidth, int Quad>
MOEC_INLINE void add_quad(TileSum<Bitwidth>& sum, Ints codes, Ints x) {
    if constexpr (Bitwidth == 8) {
        sum.wide = add_centred_products(sum.wide, codes, x);
    } else if constexpr (Bitwidth == kMxfp4 && Quad >= kQuadsPerTile / 2) {
        sum.second_half = add_products(sum.second_half, codes, x);
    } else {
        sum.narrow = add_products(sum.narrow, codes, x);
    }
}

// The dot product as floats, exact. total: sum of q over the tile.
template <int Bitwidth>
MOEC_INLINE Floats dot_of(const TileSum<Bitwidth>& sum, Floats total) {
    if constexpr (Bitwidth == 8) {
        return fma(broadcast(128.0f), total, to_float(sum.wide));
    } else if constexpr (Bitwidth == kMxfp4) {
        return to_float(add_int(sum_products(sum.narrow), sum_products(sum.second_half)));
    } else {
        return to_float(sum_products(sum.narrow));
    }
}

MOEC_INLINE Floats add_tile(Floats acc, Floats step, Floats scale, Floats minimum, Floats dot, Floats total) {
    return fma(step, fma(scale, dot, mul(minimum, total)), acc);
}

// 16 rows times one vector. acc: [16], written.
template <int Bitwidth, bool IsSymmetric>
void multiply_rounded_vector(const MatrixView& matrix, int64_t block, const RoundedRows& x, float* acc) {
    Floats sum[kVectorsPerBlock], scale[kVectorsPerBlock], minimum[kVectorsPerBlock];
    unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA { sum[decltype(v)::value] = zero(); });
    TileCursor cursor = tiles_of(matrix, block, 0);
    constexpr int kParts = parts_of(Bitwidth);
    const int64_t tiles = matrix.columns / kColumnsPerTile;
    for (int64_t t = 0; t < tiles; t += kParts, advance(cursor)) {
        if (cursor.tile_in_group == 0) {
            load_scales<Bitwidth, IsSymmetric>(cursor.group, scale, minimum);
        }
        const uint8_t* tile = tile_at(cursor);
        unroll<lines_of(Bitwidth)>([&](auto line) MOEC_INLINE_LAMBDA { prefetch(tile + kPrefetchBytes + decltype(line)::value * kPlaneBytes); });
        unroll<kParts>([&](auto part) MOEC_INLINE_LAMBDA {
            constexpr int P = decltype(part)::value;
            const int8_t* codes = x.codes + (t + P) * kColumnsPerTile;
            TileSum<Bitwidth> products[kVectorsPerBlock];
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA { products[decltype(v)::value] = no_sum<Bitwidth>(); });
            unroll<kQuadsPerTile>([&](auto quad) MOEC_INLINE_LAMBDA {
                constexpr int Q = decltype(quad)::value;
                const Ints input = broadcast_bytes(codes + Q * kColumnsPerLane);
                unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                    constexpr int V = decltype(v)::value;
                    add_quad<Bitwidth, Q>(products[V], quad_of<Bitwidth, P * kQuadsPerTile + Q, V>(tile), input);
                });
            });
            const Floats step = broadcast(x.steps[t + P]), total = broadcast(x.sums[t + P]);
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                sum[V] = add_tile(sum[V], step, scale[V], minimum[V], dot_of<Bitwidth>(products[V], total), total);
            });
        });
    }
    unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA { store(acc + decltype(v)::value * kLanes, sum[decltype(v)::value]); });
}

// 16 rows x up to 256 columns: codes as bytes, [tile][quad][row][4], and per tile 16 scales and 16 minima.
struct BytePanel {
    alignas(64) uint8_t codes[kPanelColumns * kRowsPerBlock];
    alignas(64) float scales[kPanelColumns / kColumnsPerTile][2 * kRowsPerBlock];
};

template <int Bitwidth, bool IsSymmetric>
void unpack_panel(const MatrixView& matrix, int64_t block, int64_t first_tile, int64_t tiles, BytePanel& panel) {
    constexpr int kParts = parts_of(Bitwidth);
    TileCursor cursor = tiles_of(matrix, block, first_tile * kColumnsPerTile);
    uint8_t* out = panel.codes;
    for (int64_t t = 0; t < tiles; t += kParts, advance(cursor)) {
        Floats scale[kVectorsPerBlock], minimum[kVectorsPerBlock];
        load_scales<Bitwidth, IsSymmetric>(cursor.group, scale, minimum);
        const uint8_t* tile = tile_at(cursor);
        unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            unroll<kParts>([&](auto part) MOEC_INLINE_LAMBDA {
                constexpr int P = decltype(part)::value;
                store(panel.scales[t + P] + V * kLanes, scale[V]);
                store(panel.scales[t + P] + kRowsPerBlock + V * kLanes, minimum[V]);
            });
            unroll<kParts * kQuadsPerTile>([&](auto quad) MOEC_INLINE_LAMBDA {
                constexpr int Q = decltype(quad)::value;
                store_lanes(out + Q * kPlaneBytes + V * (kPlaneBytes / 2), quad_of<Bitwidth, Q, V>(tile));
            });
        });
        out += kParts * kQuadsPerTile * kPlaneBytes;
    }
}

// x: Tokens rows from the panel's first tile on; acc: [Tokens, 16], read and written.
template <int Bitwidth, int Tokens>
void multiply_byte_panel(const BytePanel& panel, int64_t tiles, const RoundedRows* x, float* acc) {
    const uint8_t* lanes = panel.codes;
    for (int64_t t = 0; t < tiles; ++t, lanes += kQuadsPerTile * kPlaneBytes) {
        TileSum<Bitwidth> products[Tokens][kVectorsPerBlock];
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            products[decltype(i)::value][0] = products[decltype(i)::value][1] = no_sum<Bitwidth>();
        });
        unroll<kQuadsPerTile>([&](auto quad) MOEC_INLINE_LAMBDA {
            constexpr int Q = decltype(quad)::value;
            const Ints low = load_lanes(lanes + Q * kPlaneBytes), high = load_lanes(lanes + Q * kPlaneBytes + kPlaneBytes / 2);
            unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
                constexpr int I = decltype(i)::value;
                const Ints input = broadcast_bytes(x[I].codes + t * kColumnsPerTile + Q * kColumnsPerLane);
                add_quad<Bitwidth, Q>(products[I][0], low, input);
                add_quad<Bitwidth, Q>(products[I][1], high, input);
            });
        });
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            constexpr int I = decltype(i)::value;
            const Floats step = broadcast(x[I].steps[t]), total = broadcast(x[I].sums[t]);
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                float* place = acc + I * kRowsPerBlock + V * kLanes;
                const float* scales = panel.scales[t] + V * kLanes;
                store(place, add_tile(load(place), step, load(scales), load(scales + kRowsPerBlock),
                                      dot_of<Bitwidth>(products[I][V], total), total));
            });
        });
    }
}

using MultiplyRounded = void (*)(const MatrixView&, int64_t block, const RoundedRows& x, float* acc);
using UnpackPanel = void (*)(const MatrixView&, int64_t block, int64_t first_tile, int64_t tiles, BytePanel& panel);
using MultiplyBytePanel = void (*)(const BytePanel&, int64_t tiles, const RoundedRows* x, float* acc);

// The routines of one quantized format, found once per call.
struct RoundedFormat {
    MultiplyRounded multiply;
    UnpackPanel unpack;
    MultiplyBytePanel by_tokens[kRoundedTileTokens + 1];
};

template <int Bitwidth, bool IsSymmetric>
RoundedFormat make_rounded_format() {
    return {multiply_rounded_vector<Bitwidth, IsSymmetric>, unpack_panel<Bitwidth, IsSymmetric>,
            {nullptr, multiply_byte_panel<Bitwidth, 1>, multiply_byte_panel<Bitwidth, 2>, multiply_byte_panel<Bitwidth, 3>,
             multiply_byte_panel<Bitwidth, 4>}};
}

inline RoundedFormat rounded_format_of(const MatrixView& matrix) {
    if (matrix.float_type == FloatType::kMxfp4) {
        return make_rounded_format<kMxfp4, false>();
    }
    switch (matrix.bitwidth) {
        case 1:
            return make_rounded_format<1, false>();
        case kTernary:
            return make_rounded_format<kTernary, true>();
        case 2:
            return matrix.is_symmetric ? make_rounded_format<2, true>() : make_rounded_format<2, false>();
        case 3:
            return matrix.is_symmetric ? make_rounded_format<3, true>() : make_rounded_format<3, false>();
        case 4:
            return matrix.is_symmetric ? make_rounded_format<4, true>() : make_rounded_format<4, false>();
        default:
            return matrix.is_symmetric ? make_rounded_format<8, true>() : make_rounded_format<8, false>();
    }
}

inline RoundedRows rounded_row(const RoundedRows& rows, int64_t i) {
    const int64_t tiles = rows.columns / kColumnsPerTile;
    return {rows.codes + i * rows.columns, rows.steps + i * tiles, rows.sums + i * tiles, rows.columns};
}

// One row block times `count` <= 96 tokens from `first` on. acc: [count, 16], written.
inline void multiply_rounded_block(const MatrixView& matrix, const RoundedFormat& format, int64_t block, const RoundedRows& x,
                                   int64_t first, int count, float* acc) {
    constexpr int64_t kPanelTiles = kPanelColumns / kColumnsPerTile;
    BytePanel panel;
    for (int i = 0; i < count * kVectorsPerBlock; ++i) {
        store(acc + i * kLanes, zero());
    }
    const int groups = (count + kRoundedTileTokens - 1) / kRoundedTileTokens;
    const int64_t all = matrix.columns / kColumnsPerTile;
    for (int64_t tile = 0; tile < all; tile += kPanelTiles) {
        const int64_t tiles = all - tile < kPanelTiles ? all - tile : kPanelTiles;
        format.unpack(matrix, block, tile, tiles, panel);
        int token = 0;
        for (int group = 0; group < groups; ++group) {  // of nearly equal size
            const int tokens = (count - token + groups - group - 1) / (groups - group);
            RoundedRows inputs[kRoundedTileTokens];
            for (int i = 0; i < tokens; ++i) {
                inputs[i] = rounded_row(x, first + token + i);
                inputs[i].codes += tile * kColumnsPerTile;
                inputs[i].steps += tile;
                inputs[i].sums += tile;
            }
            format.by_tokens[tokens](panel, tiles, inputs, acc + token * kRowsPerBlock);
            token += tokens;
        }
    }
}
