// Products of panels (products/panel.h) with several rounded tokens at once. This file has no include guard: each
// targets/kernels_*.cpp includes it inside its own namespace, after the header of its panels. AMX has the same names in
// kernels_amx.cpp.

static_assert(kChunkTokens % kRowsSideBySide == 0 && kRowsSideBySide % kRoundedTokens == 0,
              "groups lie within rows that stand side by side");

// Prefetch about `bytes` more of the memory that will be read next.
MOEC_INLINE void ask_for_some(NextBytes& next, int64_t bytes) {
    const uint8_t* const end = next.end - next.begin < bytes ? next.end : next.begin + bytes;
    for (; next.begin < end; next.begin += kPlaneBytes) {
        prefetch(next.begin);
    }
}

// Tiles [begin, end) of the panels times Tokens rows, beginning with row first + token. The rows stand side by side, so the
// data of each row lies at a constant distance from the data of the first.
template <int Bitwidth, bool IsSymmetric, int Blocks, int Tokens>
void multiply_byte_panels(const PanelStep& step, int token, int64_t begin, int64_t end) {
    const BytePanel* panels = step.panels;
    float* acc = step.acc + token * kRowsPerBlock;
    constexpr int kVectors = Blocks * kVectorsPerBlock;
    const int64_t row = step.first + token,
                  tile = row / kRowsSideBySide * (step.rows.columns / kColumnsPerTile) + step.first_tile;
    const int64_t place = tile * kRowsSideBySide + row % kRowsSideBySide;
    const int8_t* const x = step.rows.codes + place * kColumnsPerTile;
    const float *const steps = step.rows.steps + place, *const sums = step.rows.sums + place;
    for (int64_t t = begin; t < end; ++t) {
        const uint8_t* codes[Blocks];
        const int8_t* inputs[Tokens];
        unroll<Blocks>([&](auto b) MOEC_INLINE_LAMBDA {
            codes[decltype(b)::value] = panels[decltype(b)::value].tiles[t];
        });
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            inputs[decltype(i)::value] = x + (t * kRowsSideBySide + decltype(i)::value) * kColumnsPerTile;
        });
        TileSum<Bitwidth> products[Tokens][kVectors];
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            constexpr int I = decltype(i)::value;
            const TileSum<Bitwidth> first = first_sum<Bitwidth, IsSymmetric>(broadcast(sums[t * kRowsSideBySide + I]));
            unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA { products[I][decltype(v)::value] = first; });
        });
        add_panel_products<Bitwidth, Blocks, Tokens>(codes, inputs, products);
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            constexpr int I = decltype(i)::value;
            const Floats width = broadcast(steps[t * kRowsSideBySide + I]), total = broadcast(sums[t * kRowsSideBySide + I]);
            unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int B = decltype(v)::value / kVectorsPerBlock, V = decltype(v)::value % kVectorsPerBlock;
                float* sum = acc + (B * step.count + I) * kRowsPerBlock + V * kLanes;
                const float* scales = panels[B].scales[t] + V * kLanes;
                store(sum, add_tile<Bitwidth, IsSymmetric>(load(sum), width, load(scales), load(scales + kRowsPerBlock),
                                                           products[I][decltype(v)::value], total));
            });
        });
    }
}

using MultiplyBytePanels = void (*)(const PanelStep&, int token, int64_t begin, int64_t end);

template <int Bitwidth, bool IsSymmetric, int Blocks, int Tokens>
MultiplyBytePanels panels_product() {
    return multiply_byte_panels<Bitwidth, IsSymmetric, Blocks, Tokens>;
}

// The next panel is prefetched in at least so many parts. All at once would fill the buffers that inputs and sums need.
constexpr int kAskSteps = 4;

// All tokens, in groups of nearly equal size. The rows of a group stand side by side.
inline void multiply_panels(const MultiplyBytePanels* by_tokens, const PanelStep& step, int blocks) {
    NextBytes next[kPanelBlocks] = {};
    for (int b = 0; b < blocks; ++b) {
        next[b] = step.next[b];
    }
    const int64_t all_groups = (step.count + kRoundedTokens - 1) / kRoundedTokens;
    const int64_t parts = all_groups >= kAskSteps ? 1 : (kAskSteps + all_groups - 1) / all_groups;
    const int64_t ask_bytes = (next[0].end - next[0].begin) / (all_groups * parts) + 1;
    for (int token = 0; token < step.count;) {
        const int until_tile_end = kRowsSideBySide - token % kRowsSideBySide,
                  left = step.count - token < until_tile_end ? step.count - token : until_tile_end;
        const int groups = (left + kRoundedTokens - 1) / kRoundedTokens, tokens = (left + groups - 1) / groups;
        for (int64_t part = 0; part < parts; ++part) {
            for (int b = 0; b < blocks; ++b) {
                ask_for_some(next[b], ask_bytes);
            }
            by_tokens[tokens](step, token, part * step.tiles / parts, (part + 1) * step.tiles / parts);
        }
        token += tokens;
    }
}

// What a thread sets up before it multiplies panels with `count` <= 96 tokens. Only AMX needs something here.
struct PanelSession {
    explicit PanelSession(int) {}
};
