// Products of panels of bytes with several rounded tokens at once. Included inside the namespace of an instruction set, after
// the header of its panels; the tiles of AMX have the same names of their own (amx_products.h). No include guard, for that
// reason.

#include "generic_panel_step.h"

// The products with Tokens rows, from first + token on.
template <int Bitwidth, bool IsSymmetric, int Blocks, int Tokens>
void multiply_byte_panels(const PanelStep& step, int token) {
    const BytePanel* panels = step.panels;
    const int64_t first_tile = step.first_tile, tiles = step.tiles;
    float* acc = step.acc + token * kRowsPerBlock;
    constexpr int kVectors = Blocks * kVectorsPerBlock;
    RoundedRows x[Tokens];
    unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
        constexpr int I = decltype(i)::value;
        x[I] = rounded_row(step.rows, step.first + token + I);
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
            const Floats width = broadcast(x[I].steps[t * kRowsSideBySide]), total = broadcast(x[I].sums[t * kRowsSideBySide]);
            unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int B = decltype(v)::value / kVectorsPerBlock, V = decltype(v)::value % kVectorsPerBlock;
                float* place = acc + (B * step.count + I) * kRowsPerBlock + V * kLanes;
                const float* scales = panels[B].scales[t] + V * kLanes;
                store(place, add_tile<Bitwidth, IsSymmetric>(load(place), width, load(scales), load(scales + kRowsPerBlock),
                                                             products[I][decltype(v)::value], total));
            });
        });
    }
}

using MultiplyBytePanels = void (*)(const PanelStep&, int token);

template <int Bitwidth, bool IsSymmetric, int Blocks, int Tokens>
MultiplyBytePanels panels_product() {
    return multiply_byte_panels<Bitwidth, IsSymmetric, Blocks, Tokens>;
}

// Before the panel is unpacked that is multiplied while these come.
inline void ask_at_once(const NextBytes& next) {
    for (const uint8_t* line = next.begin; line < next.end; line += kPlaneBytes) {
        prefetch(line);
    }
}

// All tokens, in groups of nearly equal size.
inline void multiply_panels(const MultiplyBytePanels* by_tokens, const PanelStep& step) {
    const int groups = (step.count + kRoundedTokens - 1) / kRoundedTokens;
    for (int group = 0, token = 0; group < groups; ++group) {
        const int tokens = (step.count - token + groups - group - 1) / (groups - group);
        by_tokens[tokens](step, token);
        token += tokens;
    }
}

// What a thread sets up before it multiplies panels with `count` <= 96 tokens, and takes down afterwards: nothing.
struct PanelSession {
    explicit PanelSession(int) {}
};
