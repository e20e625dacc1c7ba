// AVX-512 VNNI kernels on 256-bit registers: the dot product of bytes is one instruction where AVX2 takes three.
//
// This file alone is compiled with AVX-512 VL and VNNI (CMakeLists.txt) and compiles to nothing elsewhere. Only names with
// internal linkage may be defined here: an inline function shared with another file could be kept from this one by the
// linker.

#include "inlining.h"
#include "registry.h"

#if defined(MOEC_EMULATE_VNNI) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "detect.h"

namespace moec {
namespace avx512vnni {
namespace {

#include "x86_lanes.h"

// One instruction multiplies four codes with four bytes and adds the products in 32 bits.
#if defined(MOEC_EMULATE_VNNI)  // tests on processors without it: the same sums, none of which saturates
inline Ints dot_bytes(Ints sum, Ints codes, Ints x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
#else
inline Ints dot_bytes(Ints sum, Ints codes, Ints x) { return _mm256_dpbusd_epi32(sum, codes, x); }
#endif

using Products = Ints;
inline Products no_products() { return _mm256_setzero_si256(); }
inline Products add_products(Products sum, Ints codes, Ints x) { return dot_bytes(sum, codes, x); }
inline Ints sum_products(Products sum) { return sum; }
// sum + (code - 128) * x over the four bytes of a lane; the magnitude of code - 128 is at most 128, which a byte holds.
inline Ints add_centred_products(Ints sum, Ints codes, Ints x) {
    const __m256i centred = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    return dot_bytes(sum, _mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred));
}

#include "generic_kernels.h"

#if defined(MOEC_EMULATE_VNNI)
constexpr KernelTable kTable = make_table("avx512vnni", has_avx2);
#else
constexpr KernelTable kTable = make_table("avx512vnni", has_avx512vnni);
#endif

}  // namespace
}  // namespace avx512vnni

// Called on every x86 processor: returns a constant's address, and no instruction here is a wide one.
const KernelTable* avx512vnni_kernels() {
    return &avx512vnni::kTable;
}

}  // namespace moec

#else

namespace moec {

const KernelTable* avx512vnni_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
