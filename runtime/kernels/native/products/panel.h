// Panels: the codes of 16 rows x up to 256 columns as bytes, and their products with several tokens. Each product takes four
// columns (a quad) of a token. This file has no include guard: targets/kernels_*.cpp include it inside their own namespaces,
// after products/tile_sums.h. kernels_neon_i8mm.cpp and kernels_amx.cpp define the same names for other instructions.

// 16 rows x up to 256 columns.
// codes: bytes, [tile][quad][row][4]; unused where codes are multiplied as they are packed.
// scales: 16 scales and 16 minima per tile.
struct BytePanel {
    alignas(64) uint8_t codes[kBytePanelColumns * kRowsPerBlock];
    alignas(64) float scales[kBytePanelColumns / kColumnsPerTile][2 * kRowsPerBlock];
    const uint8_t* tiles[kBytePanelColumns / kColumnsPerTile];  // start of each tile's codes, in `codes` or in the matrix
};

// Store the codes of one vector of rows in two adjacent quads. The codes of symmetric formats keep their centre.
// out: where the first quad begins in the panel.
template <int Centre>
MOEC_INLINE void store_quads(uint8_t* out, Ints first, Ints second) {
    store_lanes(out, first);
    store_lanes(out + kPlaneBytes, second);
}

// Add one tile of Blocks panels times Tokens rows to their sums. codes: of the tile, in each panel; x: of the tile.
template <int Bitwidth, int Blocks, int Tokens>
MOEC_INLINE void add_panel_products(const uint8_t* const* codes, const int8_t* const* x,
                                    TileSum<Bitwidth> (*products)[Blocks * kVectorsPerBlock]) {
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
