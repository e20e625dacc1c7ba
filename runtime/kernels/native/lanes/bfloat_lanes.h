// Sixteen lanes of AVX-512 that hold pairs of bfloat16, and their dot product. This file has no include guard:
// kernels_avx512bf16.cpp and kernels_amx_bf16.cpp include it inside their own namespaces.

using Sums = __m512;   // a float per lane
using Pairs = __m512i;  // a pair of bfloat16 per lane, the first in the low half

inline Sums no_sums() { return _mm512_setzero_ps(); }
inline void store_sums(float* p, Sums a) { _mm512_storeu_ps(p, a); }
inline void store_pairs(uint16_t* p, Pairs a) { _mm512_storeu_si512(p, a); }
inline Pairs broadcast_pair(const uint16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}
// Two columns of sixteen rows as one pair per row. The columns follow one another.
inline Pairs load_columns(const uint8_t* p) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                           4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, _mm512_loadu_si512(p));
}
// The last column of an odd number of columns; the second value of each pair is zero.
inline Pairs load_last_column(const uint8_t* p) {
    return _mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// sum + second products, rounded, + first products, rounded. Subnormal numbers count as zeros, also as results.
inline Sums add_pairs(Sums sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
// `count` <= 16 floats to nearest even, and zeros after them. Subnormal floats become zeros, NaN stays NaN.
inline void round_to_bfloats(const float* x, int count, uint16_t* out) {
    const __m512 values = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), x);
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(values);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded);
}
