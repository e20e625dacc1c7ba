// Detection of instruction sets. The choice among them is in targets/choose_kernels.cpp.
//
// x86: CPUID and XGETBV. A feature counts only if the operating system saves its registers; otherwise the next context switch
// would lose their upper halves. It shows in XCR0: bits 1 (SSE) and 2 (AVX) for all, 5 to 7 for AVX-512, 17 and 18 for AMX.
//
// | CPUID leaf | register | bits |
// | 1 | ECX | 12 FMA, 27 OSXSAVE, 28 AVX, 29 F16C |
// | 7.0 | EBX | 5 AVX2, 16 AVX512F, 30 AVX512BW, 31 AVX512VL |
// | 7.0 | ECX | 11 AVX512 VNNI |
// | 7.0 | EDX | 22 AMX-BF16, 24 AMX-TILE, 25 AMX-INT8 |
// | 7.1 | EAX | 4 AVX-VNNI, 5 AVX512 BF16 |
//
// AArch64: NEON is always there. The operating system reports the extensions.

#include "targets/kernel_table.h"

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64) || defined(__i386__)

#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moec {
namespace {

struct Registers {
    uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t part = 0) {
    Registers r{0, 0, 0, 0};
#if defined(_MSC_VER)
    int highest[4], found[4];
    __cpuid(highest, 0);
    if (leaf <= static_cast<uint32_t>(highest[0])) {
        __cpuidex(found, static_cast<int>(leaf), static_cast<int>(part));
        r = {uint32_t(found[0]), uint32_t(found[1]), uint32_t(found[2]), uint32_t(found[3])};
    }
#else
    if (__get_cpuid_count(leaf, part, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) {
        r = {0, 0, 0, 0};
    }
#endif
    return r;
}

uint64_t saved_registers() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t{high} << 32) | low;
#endif
}

}  // namespace

bool has_avx2() {
    constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
    constexpr uint32_t kAvx2 = 1u << 5;
    constexpr uint64_t kSseAndAvxState = 6;
    const uint32_t wanted = kFma | kOsxsave | kAvx | kF16c;
    if ((cpuid(1).ecx & wanted) != wanted || (cpuid(7).ebx & kAvx2) == 0) {
        return false;
    }
    return (saved_registers() & kSseAndAvxState) == kSseAndAvxState;
}

bool has_avxvnni() {
    constexpr uint32_t kAvxVnni = 1u << 4;
    return has_avx2() && cpuid(7).eax >= 1 && (cpuid(7, 1).eax & kAvxVnni) != 0;
}

bool has_avx512vnni() {
    constexpr uint32_t kFoundation = 1u << 16, kBytesAndWords = 1u << 30, kVectorLengths = 1u << 31, kVnni = 1u << 11;
    constexpr uint64_t kAvx512State = 0xE6;
    const uint32_t wanted = kFoundation | kBytesAndWords | kVectorLengths;
    const Registers found = cpuid(7);
    return has_avx2() && (found.ebx & wanted) == wanted && (found.ecx & kVnni) != 0 &&
           (saved_registers() & kAvx512State) == kAvx512State;
}

bool has_avx512bf16() {
    constexpr uint32_t kBfloat = 1u << 5;
    return has_avx512vnni() && cpuid(7).eax >= 1 && (cpuid(7, 1).eax & kBfloat) != 0;
}

bool has_amx_bf16() {
    constexpr uint32_t kBfloat = 1u << 22;
    return has_amx() && has_avx512bf16() && (cpuid(7).edx & kBfloat) != 0;
}

bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr uint32_t kTiles = 1u << 24, kBytes = 1u << 25;
    constexpr uint64_t kTileState = 3u << 17;
    if (!has_avx512vnni() || (cpuid(7).edx & (kTiles | kBytes)) != (kTiles | kBytes) ||
        (saved_registers() & kTileState) != kTileState) {
        return false;
    }
    // The system refuses it if a thread's signal stack is too small for the registers.
    constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM: Linux, Documentation/arch/x86/xstate.rst
    return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
    return false;
#endif
}

}  // namespace moec

#else

namespace moec {

bool has_amx() {
    return false;
}

bool has_avx2() {
    return false;
}

bool has_avxvnni() {
    return false;
}

bool has_avx512vnni() {
    return false;
}

bool has_avx512bf16() {
    return false;
}

bool has_amx_bf16() {
    return false;
}

}  // namespace moec

#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace moec {

bool has_neon() {
#if defined(__aarch64__)
    return true;
#else
    return false;
#endif
}

bool has_neon_dot() {
#if defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
    return (getauxval(AT_HWCAP) & kDotProduct) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#else
    return false;
#endif
}

bool has_neon_i8mm() {
#if defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long kMatrixProduct = 1ul << 13;  // HWCAP2_I8MM
    return has_neon_dot() && (getauxval(AT_HWCAP2) & kMatrixProduct) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return has_neon_dot() && sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0 && has != 0;
#else
    return false;
#endif
}

}  // namespace moec
