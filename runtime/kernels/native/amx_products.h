// Panels of bytes times sixteen tokens in the tile registers of AMX: what generic_panel.h and generic_byte_products.h are to other
// instruction sets, under the same names. Included in their place, after amx_tiles.h; no include guard, for that reason.
//
// One instruction sums 16 rows x 32 columns x 16 tokens, which VNNI does in 128. A tile's sums go through memory to vectors of
// rows, and are scaled there as everywhere: three instructions a token and tile, which is what the time goes to.

static_assert(kVectorsPerBlock == 1 && kRoundedTokens == 16, "a row of sums is one vector, and a tile has sixteen");

// 16 rows x up to 256 columns: codes as bytes, signed in symmetric formats, [tile][quad][row][4], and per tile 16 scales and
// 16 minima.
struct BytePanel {
    alignas(64) uint8_t codes[kPanelColumns * kRowsPerBlock];
    alignas(64) float scales[kPanelColumns / kColumnsPerTile][2 * kRowsPerBlock];
};

// The codes of a vector of rows in two neighbouring quads, less the centre. out: of the first, in the panel.
template <int Centre>
MOEC_INLINE void store_quads(uint8_t* out, Ints first, Ints second) {
    if constexpr (Centre != 0) {
        const Ints centre = broadcast_int(Centre * 0x01010101u);
        first = sub_bytes(first, centre);
        second = sub_bytes(second, centre);
    }
    store_lanes(out, first);
    store_lanes(out + kPlaneBytes, second);
}

// Tile registers, of sixteen tokens and of the last, fewer ones.
constexpr int kSums = 0, kLastSums = 1, kInputs = 2, kLastInputs = 3, kCodes = 4;

// 1.5 * 2^23: its bits and an integer of up to 2^22 are the bits of their sum.
constexpr float kMagic = 12582912.0f;
constexpr uint32_t kMagicBits = 0x4B400000u;

// The shapes of the tile registers while panels are multiplied with `count` tokens.
struct PanelSession {
    explicit PanelSession(int count) {
        const int last = count % kRoundedTokens;
        TileShapes shapes;
        shapes.set(kSums, kRoundedTokens, kPlaneBytes);
        shapes.set(kInputs, kRoundedTokens, kColumnsPerTile);
        if (last != 0) {
            shapes.set(kLastSums, last, kPlaneBytes);
            shapes.set(kLastInputs, last, kColumnsPerTile);
        }
        shapes.set(kCodes, kQuadsPerTile, kPlaneBytes);
        configure_tiles(shapes);
    }
    PanelSession(const PanelSession&) = delete;
    PanelSession& operator=(const PanelSession&) = delete;
    ~PanelSession() { release_tiles(); }
};

inline int tokens_of_group(int count, int) { return count < kRoundedTokens ? count : kRoundedTokens; }

// The sums of one tile for Tokens tokens, [token][row], into `sums`.
template <bool IsSymmetric, int Tokens>
MOEC_INLINE void multiply_tile(const uint8_t* codes, const int8_t* inputs, int32_t* sums) {
    constexpr bool kIsWhole = Tokens == kRoundedTokens;
    constexpr int kSum = kIsWhole ? kSums : kLastSums, kInput = kIsWhole ? kInputs : kLastInputs;
    tile_zero<kSum>();
    tile_load<kInput>(inputs, kColumnsPerTile);
    tile_load<kCodes>(codes, kPlaneBytes);
    tile_multiply<kSum, kInput, kCodes, IsSymmetric>();
    tile_store<kSum>(sums, kPlaneBytes);
}

template <bool IsSymmetric, int Tokens>
void multiply_byte_panel(const BytePanel* panel, int64_t first_tile, int64_t tiles, const RoundedRows& rows, int64_t row, float* acc,
                         int64_t) {
    constexpr int64_t kAhead = 2, kTileCodes = kQuadsPerTile * kPlaneBytes;
    alignas(64) int32_t sums[2 * kAhead][Tokens * kRowsPerBlock];
    const RoundedRows first = rounded_row(rows, row);
    const int8_t* inputs = first.codes + first_tile * kColumnsPerTile * kRowsSideBySide;
    const float* steps = first.steps + first_tile * kRowsSideBySide;
    const float* totals = first.sums + first_tile * kRowsSideBySide;
    const auto multiply = [&](int64_t t) MOEC_INLINE_LAMBDA {
        multiply_tile<IsSymmetric, Tokens>(panel->codes + t * kTileCodes, inputs + t * kColumnsPerTile * kRowsSideBySide,
                                           sums[t % (2 * kAhead)]);
    };
    Floats acc_of[Tokens];
    unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA { acc_of[decltype(i)::value] = load(acc + decltype(i)::value * kRowsPerBlock); });
    for (int64_t t = 0; t < kAhead && t < tiles; ++t) {
        multiply(t);
    }
    for (int64_t t = 0; t < tiles; ++t) {
        if (t + kAhead < tiles) {
            multiply(t + kAhead);
        }
        const Floats scale = load(panel->scales[t]), minimum = load(panel->scales[t] + kRowsPerBlock);
        const Floats magic = broadcast(-kMagic), shift = mul(scale, magic);
        const uint8_t* dots = reinterpret_cast<const uint8_t*>(sums[t % (2 * kAhead)]);
        const float *step = steps + t * kRowsSideBySide, *total = totals + t * kRowsSideBySide;
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            constexpr int I = decltype(i)::value;
            const Ints dot = load_lanes(dots + I * kPlaneBytes);
            Floats scaled;
            if constexpr (IsSymmetric) {
                scaled = fma(scale, float_of(add_int(dot, broadcast_int(kMagicBits))), shift);
            } else {
                scaled = fma(scale, to_float(dot), mul(minimum, broadcast(total[I])));
            }
            acc_of[I] = fma(broadcast(step[I]), scaled, acc_of[I]);
        });
    }
    unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA { store(acc + decltype(i)::value * kRowsPerBlock, acc_of[decltype(i)::value]); });
}

using MultiplyBytePanels = void (*)(const BytePanel*, int64_t first_tile, int64_t tiles, const RoundedRows&, int64_t row, float* acc,
                                    int64_t count);

// One routine for all bitwidths: codes are bytes by now.
template <int Bitwidth, bool IsSymmetric, int Blocks, int Tokens>
MultiplyBytePanels panels_product() {
    static_assert(Blocks == 1, "one panel at a time");
    return multiply_byte_panel<IsSymmetric, Tokens>;
}
