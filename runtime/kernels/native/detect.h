// What this processor and its operating system can run.

#pragma once

namespace moec {

// AVX2, FMA and F16C, with the operating system saving the wide registers.
bool has_avx2();

}  // namespace moec
