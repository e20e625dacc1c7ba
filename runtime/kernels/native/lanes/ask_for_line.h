// One line of memory, asked for before it is needed. On x86 into the second cache: requests of the first one are few (Zen 4: some
// 22 at a time), and hold up the loads behind them.

#pragma once

#include <cstdint>

#if defined(_MSC_VER) && !defined(__clang__)
#include <immintrin.h>
#endif

namespace moec {

// Volatile: GCC takes a function that only prefetches by its builtin for one without effect, and drops every call of it.
static inline void ask_for_line(const uint8_t* p) {
#if defined(_MSC_VER) && !defined(__clang__)
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
#elif defined(__x86_64__) || defined(__i386__)
    __asm__ volatile("prefetcht1 (%0)" : : "r"(p));
#elif defined(__aarch64__)
    __asm__ volatile("prfm pldl1keep, [%0]" : : "r"(p));
#else
    __builtin_prefetch(p);
#endif
}

}  // namespace moec
