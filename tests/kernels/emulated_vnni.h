// The dot product of bytes of VNNI in AVX2, for processors without VNNI. It gives the same sums for any codes and bytes. Bytes
// are widened to 16 bits first, because sums of pairs could saturate there. No include guard, because it is included inside the
// namespace of an instruction set.

inline __m256i emulated_dot_bytes(__m256i sum, __m256i codes, __m256i x) {
    const __m256i even = _mm256_set1_epi16(255);
    const __m256i even_products =
        _mm256_madd_epi16(_mm256_and_si256(codes, even), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd_products = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even_products, odd_products));
}
