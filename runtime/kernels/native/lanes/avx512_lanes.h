// The lane operations of products in AVX-512: all sixteen rows of a row block in one register.
//
// This file has no include guard: kernels_avx512vnni.cpp and kernels_amx.cpp include it inside the namespace `wide`. There
// its names hide the names over eight lanes of lanes/x86_lanes.h. Every operation rounds exactly as the one of the same name
// in targets/kernels_scalar.cpp, so the results are equal bit for bit.

constexpr int kLanes = 16;
using Floats = __m512;
using Ints = __m512i;

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Floats load_bfloat(const uint8_t* p) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}
inline Floats load_partial(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline void store_partial(float* p, Floats a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

inline void prefetch(const uint8_t* p) { ask_for_line(p); }
inline Ints load_lanes(const uint8_t* p) { return _mm512_loadu_si512(p); }
// Sixteen bytes, one per lane.
inline Ints load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// Replace each byte, which is below 16, by its entry of the table. table: 16 bytes.
inline Ints look_up(const uint8_t* table, Ints indices) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), indices);
}
// Each byte is a fraction of 256 (see ternary_quad in products/linear.h).
inline Ints as_fractions(Ints a) { return a; }
inline Ints without_digits(Ints a) { return _mm512_add_epi8(a, _mm512_add_epi8(a, a)); }
// The first base-3 digit of each fraction: 1 from 86 on, 2 above 170.
inline Ints digits_of(Ints a) {
    const Ints ones = _mm512_maskz_mov_epi8(_mm512_cmpge_epu8_mask(a, _mm512_set1_epi8(86)), _mm512_set1_epi8(1));
    return _mm512_mask_mov_epi8(ones, _mm512_cmpgt_epu8_mask(a, _mm512_set1_epi8(static_cast<char>(170))), _mm512_set1_epi8(2));
}
template <int Count>
inline Ints shift_right(Ints a) { return _mm512_srli_epi32(a, Count); }
template <int Count>
inline Ints shift_left(Ints a) { return _mm512_slli_epi32(a, Count); }
template <int Count>
inline Ints shift_right_signed(Ints a) { return _mm512_srai_epi32(a, Count); }
inline Ints mask(Ints a, uint32_t bits) { return _mm512_and_si512(a, _mm512_set1_epi32(static_cast<int32_t>(bits))); }
inline Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints add_int(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub_int(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints sub_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
inline Ints broadcast_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
inline Floats float_of(Ints a) { return _mm512_castsi512_ps(a); }
inline Floats to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
// For whole numbers of at most 2^24 in magnitude.
inline Ints to_int(Floats a) { return _mm512_cvtps_epi32(a); }
inline void store_lanes(uint8_t* p, Ints a) { _mm512_storeu_si512(p, a); }
inline Ints broadcast_bytes(const int8_t* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return _mm512_set1_epi32(bytes);
}

// One instruction multiplies four codes with four bytes and adds the products in 32 bits.
constexpr int kProductsPerSum = 0;  // Products are 32-bit integers, of any codes
using Products = Ints;
inline Products no_products() { return _mm512_setzero_si512(); }
inline Products add_products(Products sum, Ints codes, Ints x) { return _mm512_dpbusd_epi32(sum, codes, x); }
inline Ints sum_products(Products sum) { return sum; }
constexpr int kByteCentre = 0;  // codes of 8 bits are multiplied as they are
constexpr bool kMultipliesFractions = true;  // multiplies the bytes of three-valued formats directly (products/tile_sums.h)
inline Ints add_byte_products(Ints sum, Ints codes, Ints x) { return add_products(sum, codes, x); }
