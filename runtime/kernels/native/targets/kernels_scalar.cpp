// Scalar kernels: the specification of every other instruction set, for any processor.
//
// Eight lanes are eight floats in an array. fmaf rounds once on every processor, in hardware or in the C library. So these
// results equal those of the vector kernels bit for bit. Half floats and bfloat16 are converted exactly, by integer arithmetic.

#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(MOEC_COMPACT)
#define MOEC_COMPACT
#endif
#include "lanes/compilers.h"
#include "targets/kernel_table.h"

namespace moec {
namespace scalar {
namespace {

constexpr int kLanes = 8;
constexpr int kByteCentre = 0;     // codes of 8 bits are multiplied as they are
constexpr bool kMultipliesFractions = false;

struct Floats {
    float v[kLanes];
};

struct Ints {
    uint32_t v[kLanes];
};

template <class Result, class Make>
inline Result each(Make make) {
    Result result;
    for (int i = 0; i < kLanes; ++i) {
        result.v[i] = make(i);
    }
    return result;
}

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline uint32_t load_u16(const uint8_t* p) {
    return uint32_t{p[0]} | (uint32_t{p[1]} << 8);
}

// Exponent 0 is m * 2^-24, exact in float. Exponent 31 is infinity or NaN (made quiet, as the processor does).
inline float from_half(uint32_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, mantissa = half & 0x3FFu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        return from_bits(to_bits(magnitude) | sign);
    }
    if (exponent == 31) {
        return from_bits(sign | 0x7F800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
    }
    return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline Floats zero() { return each<Floats>([](int) { return 0.0f; }); }
inline Floats broadcast(float x) { return each<Floats>([=](int) { return x; }); }
inline Floats load(const float* p) { return each<Floats>([=](int i) { return p[i]; }); }
inline Floats load_partial(const float* p, int n) { return each<Floats>([=](int i) { return i < n ? p[i] : 0.0f; }); }
inline Floats load_half(const uint8_t* p) { return each<Floats>([=](int i) { return from_half(load_u16(p + 2 * i)); }); }
inline Floats load_bfloat(const uint8_t* p) {
    return each<Floats>([=](int i) { return from_bits(load_u16(p + 2 * i) << 16); });
}
inline void store(float* p, const Floats& a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store_partial(float* p, const Floats& a, int n) { std::memcpy(p, a.v, static_cast<size_t>(n) * sizeof(float)); }
inline Floats add(const Floats& a, const Floats& b) { return each<Floats>([&](int i) { return a.v[i] + b.v[i]; }); }
inline Floats sub(const Floats& a, const Floats& b) { return each<Floats>([&](int i) { return a.v[i] - b.v[i]; }); }
inline Floats mul(const Floats& a, const Floats& b) { return each<Floats>([&](int i) { return a.v[i] * b.v[i]; }); }
inline Floats div(const Floats& a, const Floats& b) { return each<Floats>([&](int i) { return a.v[i] / b.v[i]; }); }
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return each<Floats>([&](int i) { return std::fmaf(a.v[i], b.v[i], c.v[i]); });
}
// The second operand if either is NaN, as the vector instruction does.
inline Floats larger(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats smaller(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
// Bits of ones where a < b, else zeros.
inline Ints less(const Floats& a, const Floats& b) {
    return each<Ints>([&](int i) { return a.v[i] < b.v[i] ? ~0u : 0u; });
}
inline Floats choose(const Ints& which, const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return which.v[i] != 0 ? a.v[i] : b.v[i]; });
}

inline void prefetch(const uint8_t*) {}
inline Ints load_lanes(const uint8_t* p) {
    return each<Ints>([=](int i) { return load_u16(p + 4 * i) | (load_u16(p + 4 * i + 2) << 16); });
}
inline Ints load_bytes(const uint8_t* p) { return each<Ints>([=](int i) { return uint32_t{p[i]}; }); }
inline Ints look_up(const uint8_t* table, const Ints& indices) {
    return each<Ints>([&](int i) {
        uint32_t entries = 0;
        for (int byte = 0; byte < 4; ++byte) {
            entries |= uint32_t{table[(indices.v[i] >> (8 * byte)) & 15u]} << (8 * byte);
        }
        return entries;
    });
}
// Each byte is a fraction of 256. Three times the byte is its first base-3 digit (high part) and the remaining fraction (low
// byte).
inline Ints as_fractions(const Ints& a) { return a; }
inline Ints without_digits(const Ints& a) {
    constexpr uint32_t kEven = 0x00FF00FFu;
    return each<Ints>([&](int i) { return ((a.v[i] & kEven) * 3 & kEven) | ((a.v[i] >> 8 & kEven) * 3 & kEven) << 8; });
}
inline Ints digits_of(const Ints& a) {
    constexpr uint32_t kEven = 0x00FF00FFu;
    return each<Ints>([&](int i) { return ((a.v[i] & kEven) * 3 >> 8 & kEven) | ((a.v[i] >> 8 & kEven) * 3 & ~kEven); });
}
template <int Count>
inline Ints shift_right(const Ints& a) { return each<Ints>([&](int i) { return a.v[i] >> Count; }); }
template <int Count>
inline Ints shift_left(const Ints& a) { return each<Ints>([&](int i) { return a.v[i] << Count; }); }
inline Ints mask(const Ints& a, uint32_t bits) { return each<Ints>([&](int i) { return a.v[i] & bits; }); }
inline Ints either(const Ints& a, const Ints& b) { return each<Ints>([&](int i) { return a.v[i] | b.v[i]; }); }
inline Ints add_int(const Ints& a, const Ints& b) { return each<Ints>([&](int i) { return a.v[i] + b.v[i]; }); }
inline Ints sub_int(const Ints& a, const Ints& b) { return each<Ints>([&](int i) { return a.v[i] - b.v[i]; }); }
template <int Count>
inline Ints shift_right_signed(const Ints& a) {
    constexpr uint32_t kSign = 0x80000000u;
    return each<Ints>([&](int i) { return ((a.v[i] ^ kSign) >> Count) - (kSign >> Count); });
}
inline Ints broadcast_int(uint32_t x) { return each<Ints>([=](int) { return x; }); }
inline Ints bits_of(const Floats& a) { return each<Ints>([&](int i) { return to_bits(a.v[i]); }); }
inline Floats float_of(const Ints& a) { return each<Floats>([&](int i) { return from_bits(a.v[i]); }); }
// For signed numbers of at most 2^24 in magnitude.
inline Floats to_float(const Ints& a) {
    return each<Floats>([&](int i) { return static_cast<float>(static_cast<int32_t>(a.v[i])); });
}
// For whole numbers of at most 2^24 in magnitude.
inline Ints to_int(const Floats& a) {
    return each<Ints>([&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(a.v[i])); });
}

inline Ints without(const Ints& a, const Ints& b) { return each<Ints>([&](int i) { return a.v[i] & ~b.v[i]; }); }
inline void store_lanes(uint8_t* p, const Ints& a) {
    for (int i = 0; i < 4 * kLanes; ++i) {
        p[i] = static_cast<uint8_t>(a.v[i / 4] >> (8 * (i % 4)));
    }
}
inline void store_low_bytes(int8_t* p, const Ints& a) {
    for (int i = 0; i < kLanes; ++i) {
        p[i] = static_cast<int8_t>(static_cast<uint8_t>(a.v[i]));
    }
}
inline Ints broadcast_bytes(const int8_t* p) {
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) {
        bytes |= uint32_t{static_cast<uint8_t>(p[i])} << (8 * i);
    }
    return broadcast_int(bytes);
}

// Sum over the four bytes of a lane of code * x, in 32 bits.
inline int32_t dot_bytes(uint32_t codes, uint32_t x) {
    int32_t sum = 0;
    for (int byte = 0; byte < 4; ++byte) {
        const int32_t code = static_cast<int32_t>((codes >> (8 * byte)) & 255u);
        sum += code * static_cast<int8_t>(static_cast<uint8_t>(x >> (8 * byte)));
    }
    return sum;
}

constexpr int kProductsPerSum = 0;  // Products are 32-bit integers, of any codes
using Products = Ints;
inline Products no_products() { return broadcast_int(0); }
inline Products add_products(const Products& sum, const Ints& codes, const Ints& x) {
    return each<Ints>([&](int i) { return sum.v[i] + static_cast<uint32_t>(dot_bytes(codes.v[i], x.v[i])); });
}
inline Ints sum_products(const Products& sum) { return sum; }
inline Ints add_byte_products(const Ints& sum, const Ints& codes, const Ints& x) { return add_products(sum, codes, x); }

inline float first_lane(const Floats& a) { return a.v[0]; }
// Lane i of the result holds lane i + Count of the operand, for i < Count.
template <int Count>
inline Floats upper(const Floats& a) { return each<Floats>([&](int i) { return i < Count ? a.v[i + Count] : 0.0f; }); }
inline float square_root(float x) { return std::sqrt(x); }

// Sizes of one step of a product. One token at a time: without vector registers, several tokens gain 2 % and take 1.6 times
// the code.
constexpr int kPairedBlocks = 2;   // row blocks of a 16-bit matrix, for one token
constexpr int kFloatTokens = 1;    // tokens, with a 16-bit matrix
constexpr int kPanelBlocks = 1;    // row blocks of a quantized matrix, for several tokens
constexpr int kBytePanelColumns = 256;
constexpr int kRoundedTokens = 1;  // tokens, with a quantized matrix
constexpr int kWeighedSums = 8;    // vectors of sums, of several queries, while attention weighs values
constexpr int kSystemVectors = 2;  // vectors of rows, in the systems of a quantizer
constexpr int kSystemColumns = 4;  // columns, likewise
constexpr bool multiplies_packed(int) { return false; }  // codes are unpacked to bytes before they are multiplied

#include "targets/all_kernels.h"

bool is_supported() {
    return true;
}

constexpr KernelTable kTable = make_table("scalar", is_supported);

}  // namespace
}  // namespace scalar

const KernelTable& scalar_kernels() {
    return scalar::kTable;
}

}  // namespace moec
