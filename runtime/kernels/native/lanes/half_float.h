// Conversion of floats to half floats: to nearest, ties to even. Values that are too large become the largest half float;
// NaN stays NaN. The code has no branches, so that compilers can vectorize a loop over it.

#pragma once

#include <cstdint>
#include <cstring>

#include "attention/attention_parts.h"

namespace moec {

inline HalfFloat half_of(float x) {
    constexpr uint32_t kLargest = 0x477FE000u;         // 65504
    constexpr uint32_t kSmallestNormal = 0x38800000u;  // 2^-14
    constexpr uint32_t kInfinity = 0x7F800000u;
    constexpr float kHalf = 0.5f;  // its last place is that of subnormal half floats, so the addition rounds to them
    uint32_t bits, sum_bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits & 0x80000000u, size = bits ^ sign;
    const uint32_t bounded = size < kLargest ? size : kLargest;
    const uint32_t normal = (bounded - 0x38000000u + 0xFFFu + (bounded >> 13 & 1u)) >> 13;
    float value;
    std::memcpy(&value, &bounded, sizeof value);
    const float sum = value + kHalf;
    std::memcpy(&sum_bits, &sum, sizeof sum_bits);
    const uint32_t subnormal = sum_bits - 0x3F000000u;
    uint32_t found = bounded < kSmallestNormal ? subnormal : normal;
    found = size > kInfinity ? 0x7E00u : found;
    return {static_cast<uint16_t>(found | sign >> 16)};
}

}  // namespace moec
