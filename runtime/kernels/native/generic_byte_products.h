// Products of panels of bytes with several rounded tokens at once. Included inside the namespace of an instruction set, after
// the header of its panels; the tiles of AMX have the same names of their own (amx_products.h). No include guard, for that
// reason.

// Blocks (kPanelBlocks or 1) panels, of tiles from first_tile on, times Tokens of the rows, from `row` on. acc: [Blocks, count, 16],
// from that row on, read and written.
template <int Bitwidth, bool IsSymmetric, int Blocks, int Tokens>
void multiply_byte_panels(const BytePanel* panels, int64_t first_tile, int64_t tiles, const RoundedRows& rows, int64_t row, float* acc,
                          int64_t count) {
    constexpr int kVectors = Blocks * kVectorsPerBlock;
    RoundedRows x[Tokens];
    unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
        constexpr int I = decltype(i)::value;
        x[I] = rounded_row(rows, row + I);
        x[I].codes += first_tile * kColumnsPerTile * kRowsSideBySide;
        x[I].steps += first_tile * kRowsSideBySide;
        x[I].sums += first_tile * kRowsSideBySide;
    });
    for (int64_t t = 0; t < tiles; ++t) {
        const uint8_t* codes[Blocks];
        const int8_t* inputs[Tokens];
        unroll<Blocks>([&](auto b) MOEC_INLINE_LAMBDA {
            codes[decltype(b)::value] = panels[decltype(b)::value].codes + t * kQuadsPerTile * kPlaneBytes;
        });
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA { inputs[decltype(i)::value] = x[decltype(i)::value].codes + t * kColumnsPerTile * kRowsSideBySide; });
        TileSum<Bitwidth> products[Tokens][kVectors];
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            constexpr int I = decltype(i)::value;
            const TileSum<Bitwidth> first = first_sum<Bitwidth, IsSymmetric>(broadcast(x[I].sums[t * kRowsSideBySide]));
            unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA { products[I][decltype(v)::value] = first; });
        });
        add_panel_products<Bitwidth, Blocks, Tokens>(codes, inputs, products);
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            constexpr int I = decltype(i)::value;
            const Floats step = broadcast(x[I].steps[t * kRowsSideBySide]), total = broadcast(x[I].sums[t * kRowsSideBySide]);
            unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int B = decltype(v)::value / kVectorsPerBlock, V = decltype(v)::value % kVectorsPerBlock;
                float* place = acc + (B * count + I) * kRowsPerBlock + V * kLanes;
                const float* scales = panels[B].scales[t] + V * kLanes;
                store(place, add_tile<Bitwidth, IsSymmetric>(load(place), step, load(scales), load(scales + kRowsPerBlock),
                                                             products[I][decltype(v)::value], total));
            });
        });
    }
}

using MultiplyBytePanels = void (*)(const BytePanel*, int64_t first_tile, int64_t tiles, const RoundedRows&, int64_t row, float* acc,
                                    int64_t count);

template <int Bitwidth, bool IsSymmetric, int Blocks, int Tokens>
MultiplyBytePanels panels_product() {
    return multiply_byte_panels<Bitwidth, IsSymmetric, Blocks, Tokens>;
}

// Tokens of the next of `groups` groups that `count` tokens are taken in: of nearly equal size.
inline int tokens_of_group(int count, int groups) { return (count + groups - 1) / groups; }

// What a thread sets up before it multiplies panels with `count` <= 96 tokens, and takes down afterwards: nothing.
struct PanelSession {
    explicit PanelSession(int) {}
};
