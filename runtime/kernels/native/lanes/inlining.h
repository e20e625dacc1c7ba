// Forced inlining. The vector kernels need it to keep their accumulators in registers.
//
// With MOEC_COMPACT the compiler decides itself. The scalar kernels and sanitized builds define it, because forced inlining
// makes 900 KB of code that takes minutes to compile.

#pragma once

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
