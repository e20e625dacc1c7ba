// All kernels of one instruction set, over the eight lanes that its file defines before this is included.

#include "generic_lanes.h"
#include "generic_rounding.h"
#include "generic_steps.h"
#include "generic_linear.h"
#include "generic_quantized.h"
#include "generic_product.h"
#include "generic_cached.h"
#include "generic_weighing.h"
#include "generic_rows.h"
#include "generic_attention.h"
#include "generic_table.h"
