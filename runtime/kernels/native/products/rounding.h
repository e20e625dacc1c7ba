// Activations rounded to 8 bits, written once over eight lanes. This file has no include guard: each targets/kernels_*.cpp
// includes it inside its own namespace, after lanes/eight_lanes.h.
//
// Per row and tile of 32 columns: step = max |x| / 127, q_k = x_k * (127 / max |x|) to nearest even. All q_k are zero where
// max |x| < 2^-110. A tile with a value that is not finite has the step NaN.

constexpr float kMostRounded = 127.0f;
constexpr float kSmallestRounded = 7.70371977754894341e-34f;  // 2^-110: 127 divided by less could overflow

// Round one row. x: [columns], columns a multiple of 32. codes, steps, sums: of each tile, `distance` tiles apart.
inline void round_row(const float* x, int64_t columns, int8_t* codes, float* steps, float* sums, int64_t distance) {
    constexpr int kVectors = kColumnsPerTile / kLanes;
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: the low bits of the sum are the integer
    const Ints sign = broadcast_int(0x80000000u), lowest = bits_of(magic);
    for (int64_t tile = 0; tile < columns / kColumnsPerTile;
         ++tile, x += kColumnsPerTile, codes += distance * kColumnsPerTile) {
        Floats most = zero(), strange = zero();  // strange: 0, or NaN
        unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
            const Floats value = load(x + decltype(v)::value * kLanes);
            strange = fma(value, zero(), strange);
            most = larger(float_of(without(bits_of(value), sign)), most);
        });
        const float largest = max_lanes(most) + sum_lanes(strange);
        const Floats inverse = broadcast(largest >= kSmallestRounded ? kMostRounded / largest : 0.0f);
        Ints total = broadcast_int(0);
        unroll<kVectors>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            // NaN becomes the bound, because the second of two operands wins.
            const Floats scaled =
                smaller(larger(mul(load(x + V * kLanes), inverse), broadcast(-kMostRounded)), broadcast(kMostRounded));
            const Ints rounded = sub_int(bits_of(add(scaled, magic)), lowest);
            total = add_int(total, rounded);
            store_low_bytes(codes + V * kLanes, rounded);
        });
        steps[tile * distance] = largest / kMostRounded;
        sums[tile * distance] = sum_lanes(to_float(total));
    }
}
