// NEON kernels with the matrix products of bytes (Armv8.6, optional since Armv8.2: Cortex-A510, A710, X2 and newer,
// Neoverse V1 and N2, Apple M2).
//
// Only this file is compiled with the extension (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must have
// internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/ask_for_line.h"
#include "lanes/inlining.h"
#include "targets/kernel_table.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "targets/detect.h"

namespace moec {
namespace neon_i8mm {
namespace {

#include "lanes/neon_lanes.h"

// For one token: four unsigned codes times four signed bytes, added in 32 bits. For several tokens: lanes/neon_pair_panel.h.
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
#include "lanes/neon_pair_panel.h"
#include "products/byte_products.h"
#include "products/quantized.h"
#include "products/product.h"
#include "attention/cached_rows.h"
#include "attention/weighing.h"
#include "products/rows.h"
#include "attention/cached_attention.h"
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
