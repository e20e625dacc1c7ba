// Arithmetic of bfloat16 as VDPBF16PS and TDPBF16PS define it, in float64. The specification is
// runtime/kernels/reference/bfloat_products.py. No include guard, because it is included inside a namespace.
#define MOEC_EMULATE_BFLOATS

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float flushed(float x) { return x < 0x1p-126f && x > -0x1p-126f ? (x < 0 ? -0.0f : x > 0 ? 0.0f : x) : x; }

inline uint16_t rounded_to_bfloat(float x) {
    const float value = flushed(x);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = value != value ? bits | 0x00400000u : bits + 0x7FFFu + ((bits >> 16) & 1u);
    return static_cast<uint16_t>(bits >> 16);
}

// Rounds once; a result that is tiny after rounding becomes a zero of its sign.
inline float float_flushed(double wide) {
    const double least = 0x1p-126 * (1 - 0x1p-25);
    if (wide < least && wide > -least) {
        return wide < 0 ? -0.0f : wide > 0 ? 0.0f : static_cast<float>(wide);
    }
    return static_cast<float>(wide);
}

inline float fma_flushed(uint16_t a, uint16_t b, float c) {
    const double first = double{flushed(float_of_bits(uint32_t{a} << 16))}, second = double{flushed(float_of_bits(uint32_t{b} << 16))};
    return float_flushed(first * second + double{c});
}
