// Stands for kernels_avx512vnni.cpp where the processor has that set, and the other tests of this folder check it. The kernels
// that AMX takes from it are then the scalar ones.

#include "targets/kernel_table.h"

namespace moec {

const KernelTable* avx512vnni_kernels() {
    return &scalar_kernels();
}

}  // namespace moec
