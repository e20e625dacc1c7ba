// NEON kernels for every AArch64 processor. This file defines how codes and bytes are multiplied; the loops are in
// products/quantized.h.
//
// Elsewhere this file compiles to nothing. Every name here must have internal linkage: the linker could replace a shared inline
// function of another file by the one compiled here.

#include "lanes/compilers.h"
#include "targets/kernel_table.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace moec {
namespace neon {
namespace {

#include "lanes/neon_lanes.h"

constexpr int kProductsPerSum = 1;  // that one quad adds to a sum of 16 bits
// Bytes are -127 to 127. A product of a code up to 31 is at most 3,937, so 16 bits hold the sum of eight quads.
// rows: rows 0 and 1, 2 and 3, 4 and 5, 6 and 7, four columns each.
struct Products {
    int16x8_t rows[4];
};
inline Products no_products() { return {{vdupq_n_s16(0), vdupq_n_s16(0), vdupq_n_s16(0), vdupq_n_s16(0)}}; }
inline Products add_products(Products sum, Ints codes, Ints x) {
    const int8x16_t low = signed_bytes(codes.low), high = signed_bytes(codes.high), bytes = signed_bytes(x.low);
    return {{vmlal_s8(sum.rows[0], vget_low_s8(low), vget_low_s8(bytes)), vmlal_high_s8(sum.rows[1], low, bytes),
             vmlal_s8(sum.rows[2], vget_low_s8(high), vget_low_s8(bytes)), vmlal_high_s8(sum.rows[3], high, bytes)}};
}
// Each row is four adjacent sums of 16 bits. Two registers hold four rows.
inline uint32x4_t sum_rows(int16x8_t first, int16x8_t second) {
    return vreinterpretq_u32_s32(vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second)));
}
inline Ints sum_products(Products sum) { return {sum_rows(sum.rows[0], sum.rows[1]), sum_rows(sum.rows[2], sum.rows[3])}; }
constexpr int kByteCentre = 128;  // subtracted from codes of 8 bits: a product is then at most 16,256, two of them 32,512
constexpr bool kMultipliesFractions = false;
// (code - 128) * x, summed over the four bytes of a lane.
inline uint32x4_t centred_products(uint32x4_t codes, uint32x4_t x) {
    const int8x16_t centred = signed_bytes(veorq_u32(codes, vdupq_n_u32(0x80808080u))), bytes = signed_bytes(x);
    return sum_rows(vmull_s8(vget_low_s8(centred), vget_low_s8(bytes)), vmull_high_s8(centred, bytes));
}
inline Ints add_byte_products(Ints sum, Ints codes, Ints x) {
    return add_int(sum, {centred_products(codes.low, x.low), centred_products(codes.high, x.high)});
}

#include "products/steps.h"
#include "targets/all_kernels.h"

constexpr KernelTable kTable = make_table("neon", has_neon);

}  // namespace
}  // namespace neon

const KernelTable* neon_kernels() {
    return &neon::kTable;
}

}  // namespace moec

#else

namespace moec {

const KernelTable* neon_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
