// AMX kernels: products of quantized matrices with several tokens in tile registers (products/amx_products.h). All other
// kernels are those of AVX-512 VNNI; targets/choose_kernels.cpp joins the two.
//
// Only this file is compiled with AMX (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must have internal
// linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/ask_for_line.h"
#include "lanes/inlining.h"
#include "targets/kernel_table.h"

#if defined(MOEC_EMULATE_VNNI) || ((defined(__AMX_INT8__) || defined(__AMXINT8__)) && defined(__AVX512VNNI__) && defined(__GNUC__))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "targets/detect.h"

namespace moec {
namespace amx {
namespace {

#include "lanes/x86_lanes.h"
#include "lanes/eight_lanes.h"

namespace wide {

#if defined(MOEC_EMULATE_VNNI)  // for tests on processors without it: pairs of AVX2 registers, and tiles in memory
namespace half = amx;
#include "emulated_avx512_lanes.h"
#include "emulated_amx_tiles.h"
#else
#include "lanes/avx512_lanes.h"
#include "lanes/amx_tiles.h"
#endif
#include "products/amx_steps.h"
#include "products/linear.h"
#include "products/tile_sums.h"
#include "products/amx_products.h"
#include "products/quantized.h"
#include "products/product.h"

}  // namespace wide

using wide::blocks_in_panels;
using wide::kChunkTokens;
using wide::kPanelBlocks;
using wide::linear;
using wide::multiply_one;
using wide::PanelSession;
using wide::Product;
using wide::row_of;
using wide::rows_in_block;
using wide::store_rows;

#include "products/rows.h"

constexpr int64_t kLeastTokens = 6;  // with fewer tokens the tiles are mostly empty and VNNI is faster

void linear_of_tokens(const MatrixView& matrix, const Activations& x, int64_t tokens, OutputRows out, int64_t begin,
                      int64_t end) {
    (tokens < kLeastTokens ? avx512vnni_kernels()->linear : linear)(matrix, x, tokens, out, begin, end);
}

void expert_hidden_of_tokens(const MatrixView& gate, const MatrixView& up, const Gating& gating, const Activations& x,
                             int64_t tokens, OutputRows out, int64_t begin, int64_t end) {
    (tokens < kLeastTokens ? avx512vnni_kernels()->expert_hidden : expert_hidden)(gate, up, gating, x, tokens, out, begin, end);
}

#if defined(MOEC_EMULATE_VNNI)
constexpr ProductKernels kProducts{has_avx2, linear_of_tokens, expert_hidden_of_tokens};
#else
constexpr ProductKernels kProducts{has_amx, linear_of_tokens, expert_hidden_of_tokens};
#endif

}  // namespace
}  // namespace amx

// Called on every x86 processor, so it must run no wide instruction: it returns the address of a constant.
const ProductKernels* amx_products() {
    return &amx::kProducts;
}

}  // namespace moec

#else

namespace moec {

const ProductKernels* amx_products() {
    return nullptr;
}

}  // namespace moec

#endif
