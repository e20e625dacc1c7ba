// NEON kernels with the matrix products of bytes (Armv8.6, optional since Armv8.2: Cortex-A510, A710, X2 and newer,
// Neoverse V1 and N2, Apple M2).
//
// Only this file is compiled with the extension (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must have
// internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/compilers.h"
#include "targets/kernel_table.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace moec {
namespace neon_i8mm {
namespace {

#include "lanes/neon_lanes.h"

// For one token: four unsigned codes times four signed bytes, added in 32 bits.
inline uint32x4_t dot_bytes(uint32x4_t sum, uint32x4_t codes, uint32x4_t x) {
    return vreinterpretq_u32_s32(vusdotq_s32(vreinterpretq_s32_u32(sum), vreinterpretq_u8_u32(codes), signed_bytes(x)));
}

constexpr int kProductsPerSum = 0;  // Products are 32-bit integers, of any codes
using Products = Ints;
inline Products no_products() { return broadcast_int(0); }
inline Products add_products(Products sum, Ints codes, Ints x) {
    return {dot_bytes(sum.low, codes.low, x.low), dot_bytes(sum.high, codes.high, x.high)};
}
inline Ints sum_products(Products sum) { return sum; }
constexpr int kByteCentre = 0;  // codes of 8 bits are multiplied as they are
constexpr bool kMultipliesFractions = true;  // multiplies the bytes of three-valued formats directly (products/tile_sums.h)
inline Ints add_byte_products(Ints sum, Ints codes, Ints x) { return add_products(sum, codes, x); }

#include "lanes/eight_lanes.h"
#include "products/rounding.h"
#include "products/steps.h"
#include "products/linear.h"
#include "products/tile_sums.h"

// The panels of products/panel.h for the matrix products: one instruction multiplies eight columns of two rows with eight
// columns of two tokens.

// 16 rows x up to 256 columns.
// codes: bytes, [tile][pair of quads][row / 4 % 2][row / 8][row % 4][8].
// scales: 16 scales and 16 minima per tile.
struct BytePanel {
    alignas(64) uint8_t codes[kBytePanelColumns * kRowsPerBlock];
    alignas(64) float scales[kBytePanelColumns / kColumnsPerTile][2 * kRowsPerBlock];
    const uint8_t* tiles[kBytePanelColumns / kColumnsPerTile];  // start of each tile's codes, in `codes`
};

// Store the codes of one vector of rows in two adjacent quads, the codes of a row next to each other.
// out: where the first quad begins in the panel.
template <int Centre>
MOEC_INLINE void store_quads(uint8_t* out, Ints first, Ints second) {
    store_lanes(out, {vzip1q_u32(first.low, second.low), vzip2q_u32(first.low, second.low)});
    store_lanes(out + kPlaneBytes, {vzip1q_u32(first.high, second.high), vzip2q_u32(first.high, second.high)});
}

// The eight rows of one token. pairs: products of two rows with two tokens, [row][token], of the four pairs of a vector.
template <int Token>
MOEC_INLINE Ints rows_of_token(const int32x4_t (&pairs)[4]) {
    const auto pick = [](int32x4_t a, int32x4_t b) MOEC_INLINE_LAMBDA {
        return vreinterpretq_u32_s32(Token == 0 ? vuzp1q_s32(a, b) : vuzp2q_s32(a, b));
    };
    return {pick(pairs[0], pairs[1]), pick(pairs[2], pairs[3])};
}

template <int Bitwidth>
MOEC_INLINE void add_dot(TileSum<Bitwidth>& sum, Ints dot) {
    Ints& place = Bitwidth == 8 ? sum.wide : sum.narrow;
    place = add_int(place, dot);
}

// Add one tile of one panel times Tokens rows to their sums. codes, x: of the tile.
// If the number of rows is odd, the last row also takes the part of the missing one.
template <int Bitwidth, int Blocks, int Tokens>
MOEC_INLINE void add_panel_products(const uint8_t* const* codes, const int8_t* const* x,
                                    TileSum<Bitwidth> (*products)[kVectorsPerBlock]) {
    static_assert(Blocks == 1 && kVectorsPerBlock == 2, "sixteen rows are eight pairs");
    static_assert(!multiplies_packed(Bitwidth), "pairs of quads come from a panel");
    constexpr int kTokenPairs = (Tokens + 1) / 2, kRowPairs = 4, kPairColumns = 2 * kColumnsPerLane;
    int32x4_t sums[kTokenPairs][kVectorsPerBlock][kRowPairs];
    unroll<kTokenPairs * kVectorsPerBlock * kRowPairs>([&](auto i) MOEC_INLINE_LAMBDA {
        constexpr int I = decltype(i)::value;
        sums[I / (kVectorsPerBlock * kRowPairs)][I / kRowPairs % kVectorsPerBlock][I % kRowPairs] = vdupq_n_s32(0);
    });
    unroll<kQuadsPerTile / 2>([&](auto pair) MOEC_INLINE_LAMBDA {
        constexpr int P = decltype(pair)::value;
        int8x16_t inputs[kTokenPairs];
        unroll<kTokenPairs>([&](auto j) MOEC_INLINE_LAMBDA {
            constexpr int First = 2 * decltype(j)::value, Second = First + 1 < Tokens ? First + 1 : First;
            inputs[decltype(j)::value] =
                vcombine_s8(vld1_s8(x[First] + P * kPairColumns), vld1_s8(x[Second] + P * kPairColumns));
        });
        unroll<kVectorsPerBlock * kRowPairs>([&](auto i) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(i)::value / kRowPairs, R = decltype(i)::value % kRowPairs;
            const uint8_t* place = codes[0] + (2 * P + R / 2) * kPlaneBytes + V * (kPlaneBytes / kVectorsPerBlock);
            const uint8x16_t rows = vld1q_u8(place + R % 2 * 16);
            unroll<kTokenPairs>([&](auto j) MOEC_INLINE_LAMBDA {
                int32x4_t& sum = sums[decltype(j)::value][V][R];
                sum = vusmmlaq_s32(sum, rows, inputs[decltype(j)::value]);
            });
        });
    });
    unroll<Tokens * kVectorsPerBlock>([&](auto i) MOEC_INLINE_LAMBDA {
        constexpr int I = decltype(i)::value / kVectorsPerBlock, V = decltype(i)::value % kVectorsPerBlock;
        add_dot<Bitwidth>(products[I][V], rows_of_token<I % 2>(sums[I / 2][V]));
    });
}

#include "products/byte_products.h"
#include "products/quantized.h"
#include "products/product.h"
#include "attention/cached_rows.h"
#include "attention/weighing.h"
#include "attention/recurrent_kernels.h"
#include "products/rows.h"
#include "attention/cached_attention.h"
#include "quantization/code_systems.h"
#include "quantization/quantizer_steps.h"
#include "targets/table.h"

constexpr KernelTable kTable = make_table("neon-i8mm", has_neon_i8mm);

}  // namespace
}  // namespace neon_i8mm

const KernelTable* neon_i8mm_kernels() {
    return &neon_i8mm::kTable;
}

}  // namespace moec

#else

namespace moec {

const KernelTable* neon_i8mm_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
