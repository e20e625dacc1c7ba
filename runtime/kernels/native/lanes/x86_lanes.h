// The lane operations of AVX2, FMA and F16C: eight rows of a row block, or eight features of a vector, per register.
//
// This file has no include guard: each x86 targets/kernels_*.cpp includes it first inside its own namespace. Products of codes
// and bytes depend on the instruction set: the including file or lanes/avx512_lanes.h defines them. Every operation rounds
// exactly as the one of the same name in targets/kernels_scalar.cpp, so the results are equal bit for bit.

constexpr int kLanes = 8;

using Floats = __m256;
using Ints = __m256i;

alignas(32) constexpr int32_t kPartialMask[2 * kLanes] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};

inline Ints partial_mask(int n) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kPartialMask + kLanes - n));
}

inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load_partial(const float* p, int n) { return _mm256_maskload_ps(p, partial_mask(n)); }
inline Floats load_half(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats load_bfloat(const uint8_t* p) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
}
inline void store(float* p, Floats a) { _mm256_storeu_ps(p, a); }
inline void store_partial(float* p, Floats a, int n) { _mm256_maskstore_ps(p, partial_mask(n), a); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
// Bits of ones where a < b, else zeros.
inline Ints less(Floats a, Floats b) { return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline Floats choose(Ints which, Floats a, Floats b) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(which)); }

inline void prefetch(const uint8_t* p) { ask_for_line(p); }
inline Ints load_lanes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
// Eight bytes, one per lane.
inline Ints load_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
// Replace each byte, which is below 16, by its entry of the table. table: 16 bytes.
inline Ints look_up(const uint8_t* table, Ints indices) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), indices);
}
// Each byte is a fraction of 256 (see ternary_quad in products/linear.h), stored minus 128: signed comparisons then order
// them. Tripling the stored byte modulo 256 triples the fraction, because 3 * 128 equals 128 modulo 256.
inline Ints as_fractions(Ints a) { return _mm256_xor_si256(a, _mm256_set1_epi8(-128)); }
inline Ints without_digits(Ints a) { return _mm256_add_epi8(a, _mm256_add_epi8(a, a)); }
// The first base-3 digit of each fraction: 1, minus 1 below 86, plus 1 above 170. GCC needs one more instruction for
// `not below`.
inline Ints digits_of(Ints a) {
    const __m256i below = _mm256_cmpgt_epi8(_mm256_set1_epi8(86 - 128), a),
                  above = _mm256_cmpgt_epi8(a, _mm256_set1_epi8(170 - 128));
    return _mm256_sub_epi8(_mm256_add_epi8(_mm256_set1_epi8(1), below), above);
}
template <int Count>
inline Ints shift_right(Ints a) { return _mm256_srli_epi32(a, Count); }
template <int Count>
inline Ints shift_left(Ints a) { return _mm256_slli_epi32(a, Count); }
inline Ints mask(Ints a, uint32_t bits) { return _mm256_and_si256(a, _mm256_set1_epi32(static_cast<int32_t>(bits))); }
inline Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
inline Ints add_int(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints sub_int(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
template <int Count>
inline Ints shift_right_signed(Ints a) { return _mm256_srai_epi32(a, Count); }
inline Ints broadcast_int(uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); }
inline Ints bits_of(Floats a) { return _mm256_castps_si256(a); }
inline Floats float_of(Ints a) { return _mm256_castsi256_ps(a); }
inline Floats to_float(Ints a) { return _mm256_cvtepi32_ps(a); }
// For whole numbers of at most 2^24 in magnitude.
inline Ints to_int(Floats a) { return _mm256_cvtps_epi32(a); }

inline Ints without(Ints a, Ints b) { return _mm256_andnot_si256(b, a); }
inline void store_lanes(uint8_t* p, Ints a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
// Lanes from -128 to 127, stored as one byte each.
inline void store_low_bytes(int8_t* p, Ints a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
inline Ints broadcast_bytes(const int8_t* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return _mm256_set1_epi32(bytes);
}

inline float first_lane(Floats a) { return _mm256_cvtss_f32(a); }
template <int Count>
inline Floats upper(Floats a) {
    static_assert(Count == 4 || Count == 2 || Count == 1, "half, quarter or eighth of a register");
    if constexpr (Count == 4) {
        return _mm256_zextps128_ps256(_mm256_extractf128_ps(a, 1));
    }
    const __m128 low = _mm256_castps256_ps128(a);
    return _mm256_zextps128_ps256(Count == 2 ? _mm_movehl_ps(low, low) : _mm_shuffle_ps(low, low, 1));
}
inline float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
