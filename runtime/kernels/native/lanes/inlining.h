// Inlining that the vector kernels rely on to keep their accumulators in registers.
//
// MOEC_COMPACT, defined by the scalar kernels and by sanitized builds: leave it to the compiler, which otherwise takes
// minutes over 900 KB of code.

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
