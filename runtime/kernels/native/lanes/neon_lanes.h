// The lane operations of NEON on AArch64: eight rows of a row block, or eight features of a vector, in two registers.
//
// This file has no include guard: each targets/kernels_neon*.cpp includes it first inside its own namespace, and then defines
// the products of codes and bytes, which depend on the instruction set. Every operation rounds exactly as the one of the same
// name in targets/kernels_scalar.cpp, so the results are equal bit for bit.

constexpr int kLanes = 8;

struct Floats {
    float32x4_t low, high;
};

struct Ints {
    uint32x4_t low, high;
};

inline Floats zero() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
inline Floats broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Floats load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline Floats load_partial(const float* p, int n) {
    float values[kLanes] = {};
    std::memcpy(values, p, static_cast<size_t>(n) * sizeof(float));
    return load(values);
}
inline Floats load_half(const uint8_t* p) {
    const float16x8_t values = vreinterpretq_f16_u8(vld1q_u8(p));
    return {vcvt_f32_f16(vget_low_f16(values)), vcvt_high_f32_f16(values)};
}
inline Floats load_bfloat(const uint8_t* p) {
    const uint16x8_t values = vreinterpretq_u16_u8(vld1q_u8(p));
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(values), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(values, 16))};
}
inline void store(float* p, Floats a) {
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
}
inline void store_partial(float* p, Floats a, int n) {
    float values[kLanes];
    store(values, a);
    std::memcpy(p, values, static_cast<size_t>(n) * sizeof(float));
}
inline Floats add(Floats a, Floats b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Floats sub(Floats a, Floats b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Floats mul(Floats a, Floats b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Floats div(Floats a, Floats b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
// The second operand if either is NaN. The instructions for maximum and minimum do not give that.
inline Floats larger(Floats a, Floats b) {
    return {vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low), vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
}
inline Floats smaller(Floats a, Floats b) {
    return {vbslq_f32(vcltq_f32(a.low, b.low), a.low, b.low), vbslq_f32(vcltq_f32(a.high, b.high), a.high, b.high)};
}
// Bits of ones where a < b, else zeros.
inline Ints less(Floats a, Floats b) { return {vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}; }
inline Floats choose(Ints which, Floats a, Floats b) {
    return {vbslq_f32(which.low, a.low, b.low), vbslq_f32(which.high, a.high, b.high)};
}

inline void prefetch(const uint8_t* p) { ask_for_line(p); }
inline Ints load_lanes(const uint8_t* p) { return {vreinterpretq_u32_u8(vld1q_u8(p)), vreinterpretq_u32_u8(vld1q_u8(p + 16))}; }
// Eight bytes, one per lane.
inline Ints load_bytes(const uint8_t* p) {
    const uint16x8_t words = vmovl_u8(vld1_u8(p));
    return {vmovl_u16(vget_low_u16(words)), vmovl_high_u16(words)};
}
// Replace each byte, which is below 16, by its entry of the table. table: 16 bytes.
inline Ints look_up(const uint8_t* table, Ints indices) {
    const uint8x16_t entries = vld1q_u8(table);
    return {vreinterpretq_u32_u8(vqtbl1q_u8(entries, vreinterpretq_u8_u32(indices.low))),
            vreinterpretq_u32_u8(vqtbl1q_u8(entries, vreinterpretq_u8_u32(indices.high)))};
}
// Each byte is a fraction of 256 (see ternary_quad in products/linear.h).
inline Ints as_fractions(Ints a) { return a; }
inline uint32x4_t three_times(uint32x4_t a) { return vreinterpretq_u32_u8(vmulq_u8(vreinterpretq_u8_u32(a), vdupq_n_u8(3))); }
inline Ints without_digits(Ints a) { return {three_times(a.low), three_times(a.high)}; }
// The first base-3 digit: 3 / 4 of the byte, divided by 64. Rounding down twice moves no byte across a third of 256.
inline uint32x4_t thirds(uint32x4_t a) {
    const uint8x16_t bytes = vreinterpretq_u8_u32(a);
    return vreinterpretq_u32_u8(vshrq_n_u8(vhaddq_u8(bytes, vshrq_n_u8(bytes, 1)), 6));
}
inline Ints digits_of(Ints a) { return {thirds(a.low), thirds(a.high)}; }
template <int Count>
inline Ints shift_right(Ints a) {
    if constexpr (Count == 0) {
        return a;
    } else {
        return {vshrq_n_u32(a.low, Count), vshrq_n_u32(a.high, Count)};
    }
}
template <int Count>
inline Ints shift_left(Ints a) { return {vshlq_n_u32(a.low, Count), vshlq_n_u32(a.high, Count)}; }
inline Ints broadcast_int(uint32_t x) { return {vdupq_n_u32(x), vdupq_n_u32(x)}; }
inline Ints mask(Ints a, uint32_t bits) {
    const uint32x4_t wanted = vdupq_n_u32(bits);
    return {vandq_u32(a.low, wanted), vandq_u32(a.high, wanted)};
}
inline Ints either(Ints a, Ints b) { return {vorrq_u32(a.low, b.low), vorrq_u32(a.high, b.high)}; }
inline Ints without(Ints a, Ints b) { return {vbicq_u32(a.low, b.low), vbicq_u32(a.high, b.high)}; }
inline Ints add_int(Ints a, Ints b) { return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)}; }
inline Ints sub_int(Ints a, Ints b) { return {vsubq_u32(a.low, b.low), vsubq_u32(a.high, b.high)}; }
template <int Count>
inline Ints shift_right_signed(Ints a) {
    return {vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a.low), Count)),
            vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a.high), Count))};
}
inline Ints bits_of(Floats a) { return {vreinterpretq_u32_f32(a.low), vreinterpretq_u32_f32(a.high)}; }
inline Floats float_of(Ints a) { return {vreinterpretq_f32_u32(a.low), vreinterpretq_f32_u32(a.high)}; }
inline Floats to_float(Ints a) {
    return {vcvtq_f32_s32(vreinterpretq_s32_u32(a.low)), vcvtq_f32_s32(vreinterpretq_s32_u32(a.high))};
}
// For whole numbers of at most 2^24 in magnitude.
inline Ints to_int(Floats a) {
    return {vreinterpretq_u32_s32(vcvtq_s32_f32(a.low)), vreinterpretq_u32_s32(vcvtq_s32_f32(a.high))};
}
inline void store_lanes(uint8_t* p, Ints a) {
    vst1q_u8(p, vreinterpretq_u8_u32(a.low));
    vst1q_u8(p + 16, vreinterpretq_u8_u32(a.high));
}
// Lanes from -128 to 127, stored as one byte each.
inline void store_low_bytes(int8_t* p, Ints a) {
    const uint16x8_t words = vcombine_u16(vmovn_u32(a.low), vmovn_u32(a.high));
    vst1_s8(p, vreinterpret_s8_u8(vmovn_u16(words)));
}
inline Ints broadcast_bytes(const int8_t* p) {
    uint32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return broadcast_int(bytes);
}
inline int8x16_t signed_bytes(uint32x4_t a) { return vreinterpretq_s8_u32(a); }

inline float first_lane(Floats a) { return vgetq_lane_f32(a.low, 0); }
template <int Count>
inline Floats upper(Floats a) {
    static_assert(Count == 4 || Count == 2 || Count == 1, "half, quarter or eighth of the lanes");
    if constexpr (Count == 4) {
        return {a.high, vdupq_n_f32(0.0f)};
    }
    const float32x4_t nothing = vdupq_n_f32(0.0f);
    return {Count == 2 ? vextq_f32(a.low, nothing, 2) : vextq_f32(a.low, nothing, 1), nothing};
}
inline float square_root(float x) { return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0); }
