// Products with activations rounded to bfloat16, in the tile registers of AMX (products/amx_bfloat_products.h). They serve the
// kernels of AMX; targets/choose_kernels.cpp says when.
//
// Only this file is compiled with AMX for bfloat16 (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must
// have internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/inlining.h"
#include "targets/kernel_table.h"

#if defined(MOEC_EMULATE_VNNI) || \
    ((defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__) && defined(__GNUC__))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "targets/detect.h"

namespace moec {
namespace amx_bf16 {
namespace {

#include "lanes/unroll.h"
#if defined(MOEC_EMULATE_VNNI)  // for tests on processors without it: loops over sixteen numbers, and tiles in memory
#include "emulated_bfloat_lanes.h"
#include "emulated_amx_tiles.h"
#else
#include "lanes/bfloat_lanes.h"
#include "lanes/amx_tiles.h"
#endif
#include "products/amx_bfloat_products.h"

void round_row(const float* x, int64_t columns, uint16_t* values, int64_t distance) {
    avx512bf16_kernels()->round_row(x, columns, values, distance);
}

#if defined(MOEC_EMULATE_VNNI)
constexpr BfloatKernels kKernels{"amx-bf16", has_avx2, round_row, multiply_bfloats};
#else
constexpr BfloatKernels kKernels{"amx-bf16", has_amx_bf16, round_row, multiply_bfloats};
#endif

}  // namespace
}  // namespace amx_bf16

// Called on every x86 processor, so it must run no wide instruction: it returns the address of a constant.
const BfloatKernels* amx_bf16_kernels() {
    return &amx_bf16::kKernels;
}

}  // namespace moec

#else

namespace moec {

const BfloatKernels* amx_bf16_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
