// Panels of codes that have been brought to bytes, or are read as they are packed, and their products with several tokens, four
// columns of a token at a time. Included inside the namespace of an instruction set, after products/tile_sums.h; an instruction set that multiplies otherwise
// includes the same names of its own instead (lanes/neon_pair_panel.h). No include guard, for that reason.

// 16 rows x up to 256 columns: codes as bytes, [tile][quad][row][4], unless they are multiplied as they are packed, and per tile 16
// scales and 16 minima.
struct BytePanel {
    alignas(64) uint8_t codes[kBytePanelColumns * kRowsPerBlock];
    alignas(64) float scales[kBytePanelColumns / kColumnsPerTile][2 * kRowsPerBlock];
    const uint8_t* tiles[kBytePanelColumns / kColumnsPerTile];  // where each tile's codes are: above, or packed in the matrix
};

// The codes of one vector of rows in two neighbouring quads, with the centre of symmetric formats in them. out: of the first, in the
// panel.
template <int Centre>
MOEC_INLINE void store_quads(uint8_t* out, Ints first, Ints second) {
    store_lanes(out, first);
    store_lanes(out + kPlaneBytes, second);
}

// A tile of Blocks panels times Tokens rows, added to their sums. codes: of the tile, in each panel; x: of the tile.
template <int Bitwidth, int Blocks, int Tokens>
MOEC_INLINE void add_panel_products(const uint8_t* const* codes, const int8_t* const* x, TileSum<Bitwidth> (*products)[Blocks * kVectorsPerBlock]) {
    constexpr int kVectors = Blocks * kVectorsPerBlock;
    unroll<kQuadsPerTile>([&](auto quad) MOEC_INLINE_LAMBDA {
        constexpr int Q = decltype(quad)::value;
        Ints weights[kVectors];
        unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int B = decltype(v)::value / kVectorsPerBlock, V = decltype(v)::value % kVectorsPerBlock;
            if constexpr (multiplies_packed(Bitwidth)) {
                static_assert(parts_of(Bitwidth) == 1, "a tile of codes is one of activations");
                weights[decltype(v)::value] = quad_of<Bitwidth, Q, V>(codes[B]);
            } else {
                weights[decltype(v)::value] = load_lanes(codes[B] + Q * kPlaneBytes + V * (kPlaneBytes / kVectorsPerBlock));
            }
        });
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            constexpr int I = decltype(i)::value;
            const Ints input = broadcast_bytes(x[I] + Q * kColumnsPerLane);
            unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                add_quad<Bitwidth, Q>(products[I][V], weights[V], input);
            });
        });
    });
}
