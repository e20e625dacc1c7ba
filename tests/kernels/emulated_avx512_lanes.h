// An emulation of lanes/avx512_lanes.h by pairs of registers of eight lanes, for processors without AVX-512: the kernels over
// sixteen lanes then run on AVX2. It defines the same names and is included instead. `half` is the namespace of the same names
// over eight lanes. No include guard, because it is included inside a namespace.

#include "emulated_vnni.h"

constexpr int kLanes = 16;

constexpr int kHalf = kLanes / 2;

struct Floats {
    half::Floats low, high;
};
struct Ints {
    half::Ints low, high;
};

inline Floats zero() { return {half::zero(), half::zero()}; }
inline Floats broadcast(float x) { return {half::broadcast(x), half::broadcast(x)}; }
inline Floats load(const float* p) { return {half::load(p), half::load(p + kHalf)}; }
inline Floats load_half(const uint8_t* p) { return {half::load_half(p), half::load_half(p + 2 * kHalf)}; }
inline Floats load_bfloat(const uint8_t* p) { return {half::load_bfloat(p), half::load_bfloat(p + 2 * kHalf)}; }
inline Floats load_partial(const float* p, int n) {
    return {half::load_partial(p, n < kHalf ? n : kHalf), half::load_partial(p + kHalf, n < kHalf ? 0 : n - kHalf)};
}
inline void store(float* p, Floats a) {
    half::store(p, a.low);
    half::store(p + kHalf, a.high);
}
inline void store_partial(float* p, Floats a, int n) {
    half::store_partial(p, a.low, n < kHalf ? n : kHalf);
    half::store_partial(p + kHalf, a.high, n < kHalf ? 0 : n - kHalf);
}
inline Floats add(Floats a, Floats b) { return {half::add(a.low, b.low), half::add(a.high, b.high)}; }
inline Floats sub(Floats a, Floats b) { return {half::sub(a.low, b.low), half::sub(a.high, b.high)}; }
inline Floats mul(Floats a, Floats b) { return {half::mul(a.low, b.low), half::mul(a.high, b.high)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {half::fma(a.low, b.low, c.low), half::fma(a.high, b.high, c.high)}; }

inline void prefetch(const uint8_t* p) { half::prefetch(p); }
inline Ints load_lanes(const uint8_t* p) { return {half::load_lanes(p), half::load_lanes(p + 4 * kHalf)}; }
inline Ints load_bytes(const uint8_t* p) { return {half::load_bytes(p), half::load_bytes(p + kHalf)}; }
inline Ints look_up(const uint8_t* table, Ints a) { return {half::look_up(table, a.low), half::look_up(table, a.high)}; }
inline Ints as_fractions(Ints a) { return {half::as_fractions(a.low), half::as_fractions(a.high)}; }
inline Ints without_digits(Ints a) { return {half::without_digits(a.low), half::without_digits(a.high)}; }
inline Ints digits_of(Ints a) { return {half::digits_of(a.low), half::digits_of(a.high)}; }
template <int Count>
inline Ints shift_right(Ints a) { return {half::shift_right<Count>(a.low), half::shift_right<Count>(a.high)}; }
template <int Count>
inline Ints shift_left(Ints a) { return {half::shift_left<Count>(a.low), half::shift_left<Count>(a.high)}; }
template <int Count>
inline Ints shift_right_signed(Ints a) {
    return {half::shift_right_signed<Count>(a.low), half::shift_right_signed<Count>(a.high)};
}
inline Ints mask(Ints a, uint32_t bits) { return {half::mask(a.low, bits), half::mask(a.high, bits)}; }
inline Ints either(Ints a, Ints b) { return {half::either(a.low, b.low), half::either(a.high, b.high)}; }
inline Ints add_int(Ints a, Ints b) { return {half::add_int(a.low, b.low), half::add_int(a.high, b.high)}; }
inline Ints sub_int(Ints a, Ints b) { return {half::sub_int(a.low, b.low), half::sub_int(a.high, b.high)}; }
inline Ints sub_bytes(Ints a, Ints b) { return {_mm256_sub_epi8(a.low, b.low), _mm256_sub_epi8(a.high, b.high)}; }
inline Ints broadcast_int(uint32_t x) { return {half::broadcast_int(x), half::broadcast_int(x)}; }
inline Floats float_of(Ints a) { return {half::float_of(a.low), half::float_of(a.high)}; }
inline Floats to_float(Ints a) { return {half::to_float(a.low), half::to_float(a.high)}; }
inline Ints to_int(Floats a) { return {half::to_int(a.low), half::to_int(a.high)}; }
inline void store_lanes(uint8_t* p, Ints a) {
    half::store_lanes(p, a.low);
    half::store_lanes(p + 4 * kHalf, a.high);
}
inline Ints broadcast_bytes(const int8_t* p) { return {half::broadcast_bytes(p), half::broadcast_bytes(p)}; }

constexpr int kProductsPerSum = 0;  // Products are 32-bit integers, of any codes
using Products = Ints;
inline Products no_products() { return broadcast_int(0); }
inline Products add_products(Products sum, Ints codes, Ints x) {
    return {emulated_dot_bytes(sum.low, codes.low, x.low), emulated_dot_bytes(sum.high, codes.high, x.high)};
}
inline Ints sum_products(Products sum) { return sum; }
constexpr int kByteCentre = 0;
constexpr bool kMultipliesFractions = true;
inline Ints add_byte_products(Ints sum, Ints codes, Ints x) { return add_products(sum, codes, x); }
