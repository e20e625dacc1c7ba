// AVX2 kernels. This file defines how codes and bytes are multiplied: `add_products` for 1 to 6 bits (int4 too),
// `add_byte_products` for 8 bits. products/quantized.h is the loop around them, products/tile_sums.h unpacks the codes, and
// products/linear.h has the 16-bit matrices.
//
// Only this file is compiled with AVX2, FMA and F16C (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must
// have internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/compilers.h"
#include "targets/kernel_table.h"

#if defined(__AVX2__) && (defined(__FMA__) || defined(_MSC_VER))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moec {
namespace avx2 {
namespace {

#include "lanes/x86_lanes.h"

// Bytes are -127 to 127. A sum of two products of codes up to 15 is at most 3,810, so 16 bits hold eight of these sums.
constexpr int kProductsPerSum = 2;  // that one quad adds to a sum of 16 bits
using Products = __m256i;
inline Products no_products() { return _mm256_setzero_si256(); }
inline Products add_products(Products sum, Ints codes, Ints x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x)); }
inline Ints sum_products(Products sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
constexpr int kByteCentre = 128;  // subtracted from codes of 8 bits: a sum of two products is then at most 32,512
constexpr bool kMultipliesFractions = false;
// sum + (code - 128) * x over the four bytes of a lane.
inline Ints add_byte_products(Ints sum, Ints codes, Ints x) {
    const __m256i centred = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#include "products/steps.h"
#include "targets/all_kernels.h"

constexpr KernelTable kTable = make_table("avx2", has_avx2);

}  // namespace
}  // namespace avx2

// Called on every x86 processor, so it must run no wide instruction: it returns the address of a constant.
const KernelTable* avx2_kernels() {
    return &avx2::kTable;
}

}  // namespace moec

#else

namespace moec {

const KernelTable* avx2_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
