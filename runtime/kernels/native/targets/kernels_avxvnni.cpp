// AVX-VNNI kernels: AVX2 with the dot product of bytes in one instruction instead of three. Processors: Alder Lake and later
// without AVX-512, and Zen 5.
//
// Only this file is compiled with AVX-VNNI (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must have
// internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/compilers.h"
#include "targets/kernel_table.h"

#if defined(MOEC_EMULATE_VNNI) || defined(__AVXVNNI__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moec {
namespace avxvnni {
namespace {

#include "lanes/x86_lanes.h"
#if defined(MOEC_EMULATE_VNNI)  // for tests on processors without it
#include "emulated_vnni.h"
#endif

// One instruction multiplies four codes with four bytes and adds the products in 32 bits.
constexpr int kProductsPerSum = 0;  // Products are 32-bit integers, of any codes
using Products = Ints;
inline Products no_products() { return _mm256_setzero_si256(); }
#if defined(MOEC_EMULATE_VNNI)
inline Products add_products(Products sum, Ints codes, Ints x) { return emulated_dot_bytes(sum, codes, x); }
#else
inline Products add_products(Products sum, Ints codes, Ints x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
#endif
inline Ints sum_products(Products sum) { return sum; }
constexpr int kByteCentre = 0;  // codes of 8 bits are multiplied as they are
constexpr bool kMultipliesFractions = true;  // multiplies the bytes of three-valued formats directly (products/tile_sums.h)
inline Ints add_byte_products(Ints sum, Ints codes, Ints x) { return add_products(sum, codes, x); }

#include "products/steps.h"
#include "targets/all_kernels.h"

#if defined(MOEC_EMULATE_VNNI)
constexpr KernelTable kTable = make_table("avxvnni", has_avx2);
#else
constexpr KernelTable kTable = make_table("avxvnni", has_avxvnni);
#endif

}  // namespace
}  // namespace avxvnni

// Called on every x86 processor, so it must run no wide instruction: it returns the address of a constant.
const KernelTable* avxvnni_kernels() {
    return &avxvnni::kTable;
}

}  // namespace moec

#else

namespace moec {

const KernelTable* avxvnni_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
