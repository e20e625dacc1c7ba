// What compilers spell differently: forced inlining, and the prefetch of a cache line.
//
// The vector kernels need forced inlining to keep their accumulators in registers. With MOEC_COMPACT the compiler
// decides itself. The scalar kernels and sanitized builds define it, because forced inlining makes 900 KB of code that takes
// minutes to compile.

#pragma once

#include <cstdint>

#if defined(_MSC_VER) && !defined(__clang__)
#include <immintrin.h>
#endif

#if defined(MOEC_COMPACT)
#define MOEC_INLINE static inline
#define MOEC_INLINE_LAMBDA
#elif defined(_MSC_VER) && !defined(__clang__)
#define MOEC_INLINE static __forceinline
#define MOEC_INLINE_LAMBDA
#else
#define MOEC_INLINE static inline __attribute__((always_inline))
#define MOEC_INLINE_LAMBDA __attribute__((always_inline))
#endif

namespace moec {

// Prefetch one cache line of memory. On x86 it goes into the second-level cache: the first level has few outstanding
// requests (about 22 on Zen 4), and a full queue delays later loads.
//
// Volatile, because GCC treats a function that only contains its prefetch builtin as one without effect and drops the calls.
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
