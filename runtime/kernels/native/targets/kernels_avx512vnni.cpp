// AVX-512 VNNI kernels. Products take the sixteen rows of a row block in one register and multiply bytes with one instruction
// (`add_products` in lanes/avx512_lanes.h). Operations feature by feature take sixteen features. Operations whose order of sums
// is defined for eight lanes use registers of 256 bits.
//
// Only this file is compiled with AVX-512 F, BW, VL and VNNI (CMakeLists.txt); elsewhere it compiles to nothing. Every name
// here must have internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/compilers.h"
#include "targets/kernel_table.h"

#if defined(MOEC_EMULATE_VNNI) || (defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

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

// Sizes of one step of a product for sixteen lanes and 32 registers.
constexpr int kPairedBlocks = 2;    // row blocks of a 16-bit matrix, for one token
constexpr int kFloatTokens = 12;    // tokens, with a 16-bit matrix: as many chains of fma
constexpr int kPanelBlocks = 2;     // row blocks of a quantized matrix, for several tokens; loaded bytes of inputs serve both
constexpr int kBytePanelColumns = 256;
constexpr int kRoundedTokens = 8;   // tokens, with a quantized matrix: half of the rows that stand side by side
// Whether codes are unpacked to bytes during the product, by execution units that the products leave idle.
constexpr bool multiplies_packed(int bitwidth) { return bitwidth != kTernary; }
constexpr int kSystemVectors = 3;   // vectors of rows, in the systems of a quantizer
constexpr int kSystemColumns = 8;   // columns, likewise
constexpr int kWeighedSums = 16;    // vectors of sums, of several queries, while attention weighs values

#include "products/linear.h"
#include "products/tile_sums.h"
#include "products/panel.h"
#include "products/byte_products.h"
#include "products/quantized.h"
#include "products/product.h"
#include "attention/cached_rows.h"
#include "attention/weighing.h"
#include "attention/recurrent_kernels.h"
#include "quantization/code_systems.h"

}  // namespace wide

using wide::blocks_in_panels;
using wide::code_systems;
using wide::combine;
using wide::convolve;
using wide::delta_rule;
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
#include "quantization/quantizer_steps.h"
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
