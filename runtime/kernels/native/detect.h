// What this processor and its operating system can run.

#pragma once

namespace moec {

// AVX2, FMA and F16C, with the operating system saving the wide registers.
bool has_avx2();
// The same, and the 256-bit forms of AVX-512 with its dot product of bytes.
bool has_avx512vnni();
// AArch64, and its dot product of bytes.
bool has_neon();
bool has_neon_dot();

}  // namespace moec
