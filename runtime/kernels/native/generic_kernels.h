// All kernels of one instruction set, over the lanes that its file defines before this is included.

#include "generic_lanes.h"
#include "generic_linear.h"
#include "generic_quantized.h"
#include "generic_product.h"
#include "generic_rows.h"
