// AVX-512 VNNI kernels. Products take the sixteen rows of a row block in one register and multiply bytes with one instruction
// (`add_products` in lanes/avx512_lanes.h). Operations feature by feature take sixteen features. Operations whose order of sums
// is defined for eight lanes use registers of 256 bits.
//
// Only this file is compiled with AVX-512 F, BW, VL and VNNI (CMakeLists.txt); elsewhere it compiles to nothing. Every name
// here must have internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/ask_for_line.h"
#include "lanes/inlining.h"
#include "targets/kernel_table.h"

#if defined(MOEC_EMULATE_VNNI) || (defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "targets/detect.h"

namespace moec {
namespace avx512vnni {
namespace {

#include "lanes/x86_lanes.h"
#include "lanes/eight_lanes.h"
#include "products/rounding.h"

namespace wide {

#if defined(MOEC_EMULATE_VNNI)  // for tests on processors without it: pairs of AVX2 registers
namespace half = avx512vnni;
#include "emulated_avx512_lanes.h"
#else
#include "lanes/avx512_lanes.h"
#endif
#include "products/wide_steps.h"
#include "products/linear.h"
#include "products/tile_sums.h"
#include "products/panel.h"
#include "products/byte_products.h"
#include "products/quantized.h"
#include "products/product.h"
#include "attention/cached_rows.h"
#include "attention/weighing.h"

}  // namespace wide

using wide::blocks_in_panels;
using wide::combine;
using wide::dequantize_row;
using wide::kChunkTokens;
using wide::kPanelBlocks;
using wide::linear;
using wide::multiply_one;
using wide::PanelSession;
using wide::Product;
using wide::row_of;
using wide::rows_in_block;
using wide::store_rows;
using wide::weigh_values;

#include "attention/cached_rows.h"
#include "products/rows.h"
#include "attention/cached_attention.h"
#include "targets/table.h"

#if defined(MOEC_EMULATE_VNNI)
constexpr KernelTable kTable = make_table("avx512vnni", has_avx2);
#else
constexpr KernelTable kTable = make_table("avx512vnni", has_avx512vnni);
#endif

}  // namespace
}  // namespace avx512vnni

// Called on every x86 processor, so it must run no wide instruction: it returns the address of a constant.
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
