// Stands for kernels_scalar.cpp in a program for another processor. Its results are compared with those of the scalar kernels
// here, and the scalar kernels take longer to compile than all others.

#include "targets/kernel_table.h"

namespace moec {
namespace {

bool is_supported() { return false; }

constexpr KernelTable kNone{"scalar", is_supported, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                            nullptr,  nullptr,      nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                            nullptr,  nullptr,      nullptr, nullptr};

}  // namespace

const KernelTable& scalar_kernels() {
    return kNone;
}

}  // namespace moec
