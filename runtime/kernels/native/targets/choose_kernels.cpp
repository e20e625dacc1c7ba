// Choice of the instruction set whose kernels run. It is made once, on first use: the first supported entry of a list from
// best to worst. It is one atomic pointer. All tables give the same bits, so a change between two calls is safe.

#include "targets/kernel_table.h"

#include <atomic>
#include <cstring>

namespace moec {
namespace {

std::atomic<const KernelTable*> chosen{nullptr};

// Null if a needed file compiled to nothing. The table is made in this file, because the compiler may copy structs with wide
// instructions in the files of the instruction sets.
const KernelTable* amx_kernels() {
    if (amx_products() == nullptr || avx512vnni_kernels() == nullptr) {
        return nullptr;
    }
    static const KernelTable table = [] {
        KernelTable amx = *avx512vnni_kernels();
        amx.name = "amx";
        amx.is_supported = amx_products()->is_supported;
        amx.linear = amx_products()->linear;
        amx.expert_hidden = amx_products()->expert_hidden;
        return amx;
    }();
    return &table;
}

}  // namespace

int supported_kernels(const KernelTable* tables[kMaxTables]) {
    const KernelTable* const ordered[kMaxTables] = {amx_kernels(),  avx512vnni_kernels(), avxvnni_kernels(),
                                                    avx2_kernels(), neon_i8mm_kernels(),  neon_dot_kernels(),
                                                    neon_kernels(), &scalar_kernels()};
    int count = 0;
    for (const KernelTable* table : ordered) {
        if (table != nullptr && table->is_supported()) {
            tables[count++] = table;
        }
    }
    return count;
}

const KernelTable& active_kernels() {
    const KernelTable* table = chosen.load(std::memory_order_acquire);
    if (table == nullptr) {
        const KernelTable* tables[kMaxTables];
        supported_kernels(tables);
        table = tables[0];
        chosen.store(table, std::memory_order_release);
    }
    return *table;
}

const BfloatKernels* active_bfloat_kernels() {
    const char* active = active_kernels().name;
    const bool is_amx = std::strcmp(active, "amx") == 0;
    if (is_amx && amx_bf16_kernels() != nullptr && amx_bf16_kernels()->is_supported()) {
        return amx_bf16_kernels();
    }
    const bool is_wide = is_amx || std::strcmp(active, "avx512vnni") == 0;
    const BfloatKernels* found = is_wide ? avx512bf16_kernels() : nullptr;
    return found != nullptr && found->is_supported() ? found : nullptr;
}

bool select_kernels(const char* name) {
    const KernelTable* tables[kMaxTables];
    const int count = supported_kernels(tables);
    for (int i = 0; i < count; ++i) {
        if (std::strcmp(tables[i]->name, name) == 0) {
            chosen.store(tables[i], std::memory_order_release);
            return true;
        }
    }
    return false;
}

}  // namespace moec
