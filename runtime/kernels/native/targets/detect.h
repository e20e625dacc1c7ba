// Which instruction sets the processor and the operating system support. The choice among them is in targets/choose_kernels.cpp.

#pragma once

namespace moec {

// AVX2, FMA and F16C, and the operating system saves the wide registers.
bool has_avx2();
// has_avx2() and the dot product of bytes on registers of 256 bits.
bool has_avxvnni();
// has_avx2() and AVX-512 F, BW, VL and its dot product of bytes.
bool has_avx512vnni();
// has_avx512vnni() and the dot product of pairs of bfloat16.
bool has_avx512bf16();
// has_avx512vnni() and AMX with products of bytes. The first call asks the operating system for the tile registers, for all
// threads.
bool has_amx();
// has_amx(), has_avx512bf16() and AMX with products of bfloat16.
bool has_amx_bf16();
// AArch64.
bool has_neon();
bool has_neon_dot();
// has_neon_dot() and the matrix products of bytes.
bool has_neon_i8mm();

}  // namespace moec
