// What this processor and its operating system can run.

#pragma once

namespace moec {

// AVX2, FMA and F16C, with the operating system saving the wide registers.
bool has_avx2();
// The same, and the dot product of bytes on registers of 256 bits.
bool has_avxvnni();
// The same as AVX2, and AVX-512 F, BW, VL and its dot product of bytes.
bool has_avx512vnni();
// The same, and AMX with products of bytes, whose registers the operating system must be asked for, once for all threads.
bool has_amx();
// AArch64, and its dot product of bytes.
bool has_neon();
bool has_neon_dot();
// The same, and its matrix products of bytes.
bool has_neon_i8mm();

}  // namespace moec
