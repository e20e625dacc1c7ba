// Products with activations rounded to bfloat16, by the dot product of pairs of AVX-512 BF16. They serve the kernels of
// AVX-512 VNNI and of AMX; targets/choose_kernels.cpp says when.
//
// Only this file is compiled with AVX-512 BF16 (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must have
// internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/inlining.h"
#include "targets/kernel_table.h"

#if defined(MOEC_EMULATE_VNNI) || (defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "targets/detect.h"

namespace moec {
namespace avx512bf16 {
namespace {

#include "lanes/unroll.h"
#if defined(MOEC_EMULATE_VNNI)  // for tests on processors without it: loops over sixteen numbers
#include "emulated_bfloat_lanes.h"
#else
#include "lanes/bfloat_lanes.h"
#endif
#include "products/bfloat_products.h"

#if defined(MOEC_EMULATE_VNNI)
constexpr BfloatKernels kKernels{"avx512bf16", has_avx2, round_row, multiply_bfloats};
#else
constexpr BfloatKernels kKernels{"avx512bf16", has_avx512bf16, round_row, multiply_bfloats};
#endif

}  // namespace
}  // namespace avx512bf16

// Called on every x86 processor, so it must run no wide instruction: it returns the address of a constant.
const BfloatKernels* avx512bf16_kernels() {
    return &avx512bf16::kKernels;
}

}  // namespace moec

#else

namespace moec {

const BfloatKernels* avx512bf16_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
