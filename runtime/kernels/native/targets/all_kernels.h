// All kernels of one instruction set with eight lanes, in the order in which they depend on each other. The including file
// defines the lane operations and the sizes of steps (products/steps.h) before. No include guard: each targets/kernels_*.cpp
// includes it inside its own namespace.

#include "lanes/eight_lanes.h"
#include "products/rounding.h"
#include "products/linear.h"
#include "products/tile_sums.h"
#include "products/panel.h"
#include "products/byte_products.h"
#include "products/quantized.h"
#include "products/product.h"
#include "attention/cached_rows.h"
#include "attention/weighing.h"
#include "attention/recurrent_kernels.h"
#include "products/rows.h"
#include "attention/cached_attention.h"
#include "quantization/code_systems.h"
#include "quantization/quantizer_steps.h"
#include "targets/table.h"
