// Products of quantized matrices of 1 to 8 bits (int4 too) with activations rounded to 8 bits (products/rounding.h), written
// once over eight or sixteen lanes. The instruction that multiplies is `add_products` in targets/kernels_*.cpp, for example
// kernels_avx2.cpp. This file has no include guard: each targets/kernels_*.cpp includes it inside its own namespace, after
// products/byte_products.h.
//
// - Algebra, per output row and token: acc = 0; for tiles in order: dot = sum code_k q_k (exact, 32-bit integers),
//   acc = fma(step, fma(scale, dot, minimum * sum q_k), acc).
// - Symmetric formats, where minimum is -centre scale: acc = fma(step, scale * (dot - centre sum q_k), acc). It is the same
//   number where all are finite, since both products are exact.
// - Bound: |error| <= sum over tiles of step / 2 * sum |w_k|, and three roundings of the tile's terms, to first order.
// - Accuracy class: bit-equal across instruction sets, thread counts and batches.
// - One token (multiply_rounded_vector): directly from the packed codes, one row block after the other, so that a matrix is a
//   single stream of memory. The code prefetches kPrefetchBytes ahead, because hardware prefetching stops at every page.
// - Several tokens (multiply_rounded_blocks): the codes of 16 rows x 256 columns become bytes once per 96 tokens, or in every
//   group of tokens where that costs nothing (multiplies_packed). They are multiplied with kRoundedTokens tokens at a time,
//   4 for eight lanes. The accumulators stay in memory between tiles, which changes no bit.

// Measured: on Zen 3, 2 to 4 KiB are equal, 1 and 8 KiB lose up to a tenth. On Granite Rapids 1 and 2 KiB are best. On Zen 4,
// 4 KiB (the same place of the next page) nearly halves the rate of 2 to 4 bits.
constexpr int kPrefetchBytes = 2048;

// 16 rows times one vector. acc: [16], written.
template <int Bitwidth, bool IsSymmetric, bool HasByteScales>
void multiply_rounded_vector(const MatrixView& matrix, int64_t block, const RoundedRows& x, float* acc) {
    Floats sum[kVectorsPerBlock], scale[kVectorsPerBlock], minimum[kVectorsPerBlock];
    unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
        sum[decltype(v)::value] = scale[decltype(v)::value] = minimum[decltype(v)::value] = zero();
    });
    TileCursor cursor = tiles_of(matrix, block, 0);
    const RowSteps steps = load_steps<HasByteScales>(cursor.block);
    constexpr int kParts = parts_of(Bitwidth);
    const int64_t tiles = matrix.columns / kColumnsPerTile;
    for (int64_t t = 0; t < tiles; t += kParts, advance(cursor)) {
        if (cursor.tile_in_group == 0) {
            load_scales<Bitwidth, IsSymmetric, HasByteScales>(cursor.group, steps, scale, minimum);
        }
        const uint8_t* tile = tile_at(cursor);
        unroll<lines_of(Bitwidth)>([&](auto line) MOEC_INLINE_LAMBDA {
            prefetch(tile + kPrefetchBytes + decltype(line)::value * kPlaneBytes);
        });
        unroll<kParts>([&](auto part) MOEC_INLINE_LAMBDA {
            constexpr int P = decltype(part)::value;
            const int8_t* codes = x.codes + (t + P) * kColumnsPerTile;
            const Floats step = broadcast(x.steps[t + P]), total = broadcast(x.sums[t + P]);
            TileSum<Bitwidth> products[kVectorsPerBlock];
            FractionSums fractions[kVectorsPerBlock];
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                products[decltype(v)::value] = first_sum<Bitwidth, IsSymmetric>(total);
                fractions[decltype(v)::value] = no_fractions();
            });
            unroll<kQuadsPerTile>([&](auto quad) MOEC_INLINE_LAMBDA {
                constexpr int Q = decltype(quad)::value;
                const Ints input = broadcast_bytes(codes + Q * kColumnsPerLane);
                unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                    constexpr int V = decltype(v)::value;
                    add_codes<Bitwidth, Q, P * kQuadsPerTile + Q, V>(products[V], fractions[V], tile, input);
                });
            });
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                add_fractions(products[V], fractions[V]);
                sum[V] = add_tile<Bitwidth, IsSymmetric>(sum[V], step, scale[V], minimum[V], products[V], total);
            });
        });
    }
    unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
        store(acc + decltype(v)::value * kLanes, sum[decltype(v)::value]);
    });
}

template <int Bitwidth, bool IsSymmetric, bool HasByteScales>
void unpack_panel(const MatrixView& matrix, int64_t block, int64_t first_tile, int64_t tiles, BytePanel& panel) {
    constexpr int kParts = parts_of(Bitwidth);
    TileCursor cursor = tiles_of(matrix, block, first_tile * kColumnsPerTile);
    const RowSteps steps = load_steps<HasByteScales>(cursor.block);
    uint8_t* out = panel.codes;
    for (int64_t t = 0; t < tiles; t += kParts, advance(cursor)) {
        Floats scale[kVectorsPerBlock], minimum[kVectorsPerBlock];
        load_scales<Bitwidth, IsSymmetric, HasByteScales>(cursor.group, steps, scale, minimum);
        const uint8_t* tile = tile_at(cursor);
        unroll<kParts>([&](auto part) MOEC_INLINE_LAMBDA {
            constexpr int P = decltype(part)::value;
            panel.tiles[t + P] = multiplies_packed(Bitwidth) ? tile : out + P * kQuadsPerTile * kPlaneBytes;
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                store(panel.scales[t + P] + V * kLanes, scale[V]);
                store(panel.scales[t + P] + kRowsPerBlock + V * kLanes, minimum[V]);
            });
        });
        if constexpr (!multiplies_packed(Bitwidth)) {
            unroll<kVectorsPerBlock>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                unroll<kParts * kQuadsPerTile / 2>([&](auto pair) MOEC_INLINE_LAMBDA {
                    constexpr int Q = 2 * decltype(pair)::value;
                    store_quads<IsSymmetric ? centre_of(Bitwidth) : 0>(
                        out + Q * kPlaneBytes + V * (kPlaneBytes / kVectorsPerBlock), quad_of<Bitwidth, Q, V>(tile),
                        quad_of<Bitwidth, Q + 1, V>(tile));
                });
            });
            out += kParts * kQuadsPerTile * kPlaneBytes;
        }
    }
}

using MultiplyRounded = void (*)(const MatrixView&, int64_t block, const RoundedRows& x, float* acc);
using UnpackPanel = void (*)(const MatrixView&, int64_t block, int64_t first_tile, int64_t tiles, BytePanel& panel);

// The functions of one quantized format, looked up once per call.
struct RoundedFormat {
    MultiplyRounded multiply;
    UnpackPanel unpack;
    MultiplyBytePanels by_tokens[kRoundedTokens + 1];  // for kPanelBlocks row blocks
    MultiplyBytePanels last_by_tokens[kRoundedTokens + 1];  // for one row block
};

template <int Bitwidth, bool IsSymmetric, bool HasByteScales = false>
RoundedFormat make_rounded_format() {
    RoundedFormat format{multiply_rounded_vector<Bitwidth, IsSymmetric, HasByteScales>,
                         unpack_panel<Bitwidth, IsSymmetric, HasByteScales>, {}, {}};
    unroll<kRoundedTokens>([&](auto i) MOEC_INLINE_LAMBDA {
        constexpr int kTokens = decltype(i)::value + 1;
        format.by_tokens[kTokens] = panels_product<Bitwidth, IsSymmetric, kPanelBlocks, kTokens>();
        format.last_by_tokens[kTokens] = panels_product<Bitwidth, IsSymmetric, 1, kTokens>();
    });
    return format;
}

template <int Bitwidth>
RoundedFormat rounded_integers(const MatrixView& matrix) {
    if constexpr (Bitwidth <= kMaxByteScalesBits) {
        if (matrix.has_byte_scales) {
            return make_rounded_format<Bitwidth, false, true>();
        }
    }
    if constexpr (Bitwidth > 1) {
        if (matrix.is_symmetric) {
            return make_rounded_format<Bitwidth, true>();
        }
    }
    return make_rounded_format<Bitwidth, false>();
}

inline RoundedFormat rounded_format_of(const MatrixView& matrix) {
    if (matrix.float_type == FloatType::kMxfp4) {
        return make_rounded_format<kMxfp4, false>();
    }
    switch (matrix.bitwidth) {
        case 1:
            return rounded_integers<1>(matrix);
        case kTernary:
            return make_rounded_format<kTernary, true>();
        case 2:
            return rounded_integers<2>(matrix);
        case 3:
            return rounded_integers<3>(matrix);
        case 4:
            return rounded_integers<4>(matrix);
        case 5:
            return rounded_integers<5>(matrix);
        case 6:
            return rounded_integers<6>(matrix);
        default:
            return rounded_integers<8>(matrix);
    }
}

// The bytes of the panel that begins with `tile`. If the matrix has no such panel, memory after the matrix.
inline NextBytes bytes_of_panel(const MatrixView& matrix, int64_t block, int64_t tile) {
    const int64_t tiles = matrix.columns / kColumnsPerTile, block_size = block_bytes(matrix);
    const uint8_t* start = matrix.data + block * block_size + tile * block_size / tiles;
    return {start, start + block_size * (kBytePanelColumns / kColumnsPerTile) / tiles};
}

// kPanelBlocks row blocks, or 1, times `count` <= 96 tokens, beginning with `first`. acc: [blocks, count, 16], written.
inline void multiply_rounded_blocks(const MatrixView& matrix, const RoundedFormat& format, int64_t block, int blocks,
                                    const RoundedRows& x, int64_t first, int count, float* acc) {
    constexpr int64_t kPanelTiles = kBytePanelColumns / kColumnsPerTile;
    BytePanel panels[kPanelBlocks];
    const MultiplyBytePanels* by_tokens = blocks == kPanelBlocks ? format.by_tokens : format.last_by_tokens;
    for (int i = 0; i < blocks * count * kVectorsPerBlock; ++i) {
        store(acc + i * kLanes, zero());
    }
    const int64_t all = matrix.columns / kColumnsPerTile;
    for (int64_t tile = 0; tile < all; tile += kPanelTiles) {
        const int64_t tiles = all - tile < kPanelTiles ? all - tile : kPanelTiles;
        NextBytes next[kPanelBlocks];  // of this row block or of the next step; loaded while this panel is multiplied
        for (int b = 0; b < blocks; ++b) {
            const bool ends = tile + tiles == all;
            next[b] = bytes_of_panel(matrix, ends ? block + blocks + b : block + b, ends ? 0 : tile + tiles);
            format.unpack(matrix, block + b, tile, tiles, panels[b]);
        }
        multiply_panels(by_tokens, {panels, tile, tiles, x, first, count, acc, next}, blocks);
    }
}
