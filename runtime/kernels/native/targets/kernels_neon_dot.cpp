// NEON kernels with the dot-product extension (Armv8.2 and later: Cortex-A55, A75 and newer, all Apple silicon).
//
// Only this file is compiled with the extension (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must have
// internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/compilers.h"
#include "targets/kernel_table.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace moec {
namespace neon_dot {
namespace {

#include "lanes/neon_lanes.h"

// One instruction multiplies four codes with four bytes and adds the products in 32 bits.
inline uint32x4_t dot_bytes(uint32x4_t sum, uint32x4_t codes, uint32x4_t x) {
    return vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(sum), signed_bytes(codes), signed_bytes(x)));
}

constexpr int kProductsPerSum = 0;  // Products are 32-bit integers, of any codes
using Products = Ints;
inline Products no_products() { return broadcast_int(0); }
inline Products add_products(Products sum, Ints codes, Ints x) {
    return {dot_bytes(sum.low, codes.low, x.low), dot_bytes(sum.high, codes.high, x.high)};
}
inline Ints sum_products(Products sum) { return sum; }
constexpr int kByteCentre = 128;  // subtracted from codes of 8 bits, because the instruction takes signed codes
constexpr bool kMultipliesFractions = false;
// sum + (code - 128) * x over the four bytes of a lane.
inline Ints add_byte_products(Ints sum, Ints codes, Ints x) {
    const uint32x4_t sign = vdupq_n_u32(0x80808080u);
    return add_products(sum, {veorq_u32(codes.low, sign), veorq_u32(codes.high, sign)}, x);
}

#include "products/steps.h"
#include "targets/all_kernels.h"

constexpr KernelTable kTable = make_table("neon-dot", has_neon_dot);

}  // namespace
}  // namespace neon_dot

const KernelTable* neon_dot_kernels() {
    return &neon_dot::kTable;
}

}  // namespace moec

#else

namespace moec {

const KernelTable* neon_dot_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
