// AMX kernels: products of quantized matrices with several tokens in tile registers. All other kernels are those of
// AVX-512 VNNI; targets/choose_kernels.cpp joins the two.
//
// Only this file is compiled with AMX (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must have internal
// linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/compilers.h"
#include "targets/kernel_table.h"

#if defined(MOEC_EMULATE_VNNI) || ((defined(__AMX_INT8__) || defined(__AMXINT8__)) && defined(__AVX512VNNI__) && defined(__GNUC__))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moec {
namespace amx {
namespace {

#include "lanes/x86_lanes.h"
#include "lanes/eight_lanes.h"

namespace wide {

#if defined(MOEC_EMULATE_VNNI)  // for tests on processors without it: pairs of AVX2 registers, and tiles in memory
namespace half = amx;
#include "emulated_avx512_lanes.h"
#include "emulated_amx_tiles.h"
#else
#include "lanes/avx512_lanes.h"
#include "lanes/amx_tiles.h"
#endif

// Sizes of one step of a product when tiles multiply sixteen rows with sixteen tokens.
constexpr int kPairedBlocks = 2;    // row blocks of a 16-bit matrix, for one token
constexpr int kFloatTokens = 12;    // tokens, with a 16-bit matrix: as many chains of fma
constexpr int kPanelBlocks = 1;     // row blocks of a quantized matrix, for several tokens
constexpr int kBytePanelColumns = 512;
constexpr int kRoundedTokens = 16;  // tokens, with a quantized matrix: their sums fill half of the registers
constexpr bool multiplies_packed(int) { return false; }  // codes are unpacked to bytes before they are multiplied

#include "products/linear.h"
#include "products/tile_sums.h"

// Products of quantized matrices with several tokens in tile registers. The names are those of products/panel.h and
// products/byte_products.h, which this file does not include.
//
// One instruction sums 16 rows x 32 columns x 16 tokens; VNNI needs 128 instructions for that. The sums of a tile go through
// memory into vectors of rows, where they are scaled. Scaling takes most of the time: after a tile instruction the processor
// issues one 16-float operation per cycle instead of two. Each token and tile takes two of them, four in asymmetric formats.

static_assert(kVectorsPerBlock == 1 && kRoundedTokens == 16, "a row of sums is one vector, and a tile has sixteen");

// 16 rows x up to 512 columns.
// codes: bytes, signed in symmetric formats, [tile][quad][row][4].
// scales: 16 scales and 16 minima per tile.
struct BytePanel {
    alignas(64) uint8_t codes[kBytePanelColumns * kRowsPerBlock];
    alignas(64) float scales[kBytePanelColumns / kColumnsPerTile][2 * kRowsPerBlock];
    const uint8_t* tiles[kBytePanelColumns / kColumnsPerTile];  // start of each tile's codes, in `codes`
};

// Store the codes of a vector of rows in two adjacent quads, minus the centre. out: where the first quad begins in the panel.
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

// Numbers of the tile registers. The last group of tokens may be smaller than sixteen and has registers of its own.
constexpr int kSums = 0, kLastSums = 1, kInputs = 2, kLastInputs = 3, kCodes = 4;

// 1.5 * 2^23. Its bits plus an integer of at most 2^22 are the bits of the float that is their sum. No sum of a tile is larger.
constexpr float kMagic = 12582912.0f;
constexpr uint32_t kMagicBits = 0x4B400000u;

// Sets the shapes of the tile registers while panels are multiplied with `count` tokens.
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

// Store the sums of one tile for Tokens tokens, [token][row], into `sums`.
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

// Products with `groups` groups of Tokens rows, beginning with row first + token. A tile is multiplied kAhead tiles before
// its sums are scaled, also across groups, so that scaling does not wait.
template <bool IsSymmetric, int Tokens>
void multiply_byte_panel(const PanelStep& step, int token, int groups) {
    constexpr int64_t kAhead = 3, kBuffers = 4, kTileCodes = kQuadsPerTile * kPlaneBytes;
    constexpr int64_t kTileInputs = kRowsSideBySide * kColumnsPerTile;
    alignas(64) int32_t sums[kBuffers][Tokens * kRowsPerBlock];
    const int64_t tiles = step.tiles, all = groups * tiles;
    const int64_t group_tiles = step.rows.columns / kColumnsPerTile;  // of a group of rows in memory
    const RoundedRows first = rounded_row(step.rows, step.first + token);
    // The next product: tile, panel and inputs.
    int64_t multiplied = 0, left = tiles;
    const uint8_t* codes = step.panels->codes;
    const int8_t* inputs = first.codes + step.first_tile * kTileInputs;
    const auto multiply = [&]() MOEC_INLINE_LAMBDA {
        multiply_tile<IsSymmetric, Tokens>(codes, inputs, sums[multiplied++ % kBuffers]);
        codes += kTileCodes;
        inputs += kTileInputs;
        if (--left == 0) {
            left = tiles;
            codes = step.panels->codes;
            inputs += (group_tiles - tiles) * kTileInputs;
        }
    };
    const uint8_t* asked = step.next->begin;  // prefetched by the first call of a step
    const int64_t ask = token == 0 ? (step.next->end - step.next->begin + all - 1) / all : 0;
    while (multiplied < kAhead && multiplied < all) {
        multiply();
    }
    float* acc = step.acc + token * kRowsPerBlock;
    for (int64_t scaled = 0; scaled < all; acc += Tokens * kRowsPerBlock) {
        const int64_t tile = step.first_tile + scaled / tiles * group_tiles;
        const float *steps = first.steps + tile * kRowsSideBySide, *totals = first.sums + tile * kRowsSideBySide;
        Floats acc_of[Tokens];
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            acc_of[decltype(i)::value] = load(acc + decltype(i)::value * kRowsPerBlock);
        });
        for (int64_t t = 0; t < tiles; ++t, ++scaled, steps += kRowsSideBySide, totals += kRowsSideBySide) {
            if (multiplied < all) {
                multiply();
            }
            for (const uint8_t* end = asked + ask; asked < end; asked += kPlaneBytes) {
                prefetch(asked);
            }
            const Floats scale = load(step.panels->scales[t]), minimum = load(step.panels->scales[t] + kRowsPerBlock);
            const Floats shift = mul(scale, broadcast(-kMagic));
            const uint8_t* dots = reinterpret_cast<const uint8_t*>(sums[scaled % kBuffers]);
            unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
                constexpr int I = decltype(i)::value;
                const Ints dot = load_lanes(dots + I * kPlaneBytes);
                Floats weighed;
                if constexpr (IsSymmetric) {  // rounded once, like scale * sum: `shift` is exact for a half-precision scale
                    weighed = fma(scale, float_of(add_int(dot, broadcast_int(kMagicBits))), shift);
                } else {
                    weighed = fma(scale, to_float(dot), mul(minimum, broadcast(totals[I])));
                }
                acc_of[I] = fma(broadcast(steps[I]), weighed, acc_of[I]);
            });
        }
        unroll<Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
            store(acc + decltype(i)::value * kRowsPerBlock, acc_of[decltype(i)::value]);
        });
    }
}

using MultiplyBytePanels = void (*)(const PanelStep&, int token, int groups);

// One function for all bitwidths: the codes are already bytes.
template <int Bitwidth, bool IsSymmetric, int Blocks, int Tokens>
MultiplyBytePanels panels_product() {
    static_assert(Blocks == 1, "one panel at a time");
    return multiply_byte_panel<IsSymmetric, Tokens>;
}

inline void multiply_panels(const MultiplyBytePanels* by_tokens, const PanelStep& step, int) {
    const int groups = step.count / kRoundedTokens, whole = groups * kRoundedTokens;
    if (groups > 0) {
        by_tokens[kRoundedTokens](step, 0, groups);
    }
    if (whole < step.count) {
        by_tokens[step.count - whole](step, whole, 1);
    }
}

#include "products/quantized.h"
#include "products/product.h"

}  // namespace wide

using wide::blocks_in_panels;
using wide::kChunkTokens;
using wide::kPanelBlocks;
using wide::linear;
using wide::multiply_one;
using wide::PanelSession;
using wide::Product;
using wide::row_of;
using wide::rows_in_block;
using wide::store_rows;

#include "products/rows.h"

constexpr int64_t kLeastTokens = 6;  // with fewer tokens the tiles are mostly empty and VNNI is faster

void linear_of_tokens(const MatrixView& matrix, const Activations& x, int64_t tokens, OutputRows out, int64_t begin,
                      int64_t end) {
    (tokens < kLeastTokens ? avx512vnni_kernels()->linear : linear)(matrix, x, tokens, out, begin, end);
}

void expert_hidden_of_tokens(const MatrixView& gate, const MatrixView& up, const Gating& gating, const Activations& x,
                             int64_t tokens, OutputRows out, int64_t begin, int64_t end) {
    (tokens < kLeastTokens ? avx512vnni_kernels()->expert_hidden : expert_hidden)(gate, up, gating, x, tokens, out, begin, end);
}

#if defined(MOEC_EMULATE_VNNI)
constexpr ProductKernels kProducts{has_avx2, linear_of_tokens, expert_hidden_of_tokens};
#else
constexpr ProductKernels kProducts{has_amx, linear_of_tokens, expert_hidden_of_tokens};
#endif

}  // namespace
}  // namespace amx

// Called on every x86 processor, so it must run no wide instruction: it returns the address of a constant.
const ProductKernels* amx_products() {
    return &amx::kProducts;
}

}  // namespace moec

#else

namespace moec {

const ProductKernels* amx_products() {
    return nullptr;
}

}  // namespace moec

#endif
