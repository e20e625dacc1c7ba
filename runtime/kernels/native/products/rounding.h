// Activations rounded to 8 bits, written once over eight lanes. Included inside the namespace of an instruction set, after
// lanes/eight_lanes.h; no include guard, for that reason.
//
// Per row and tile of 32 columns: step = max |x| / 127, q_k = x_k * (127 / max |x|) to nearest even, all zero where
// max |x| < 2^-110. A tile that holds a value that is not finite has the step NaN.

constexpr float kMostRounded = 127.0f;
constexpr float kSmallestRounded = 7.70371977754894341e-34f;  // 2^-110: 127 divided by less could overflow

// [columns] floats to codes, step and sum of each tile, `distance` tiles from those of the next. columns: a multiple of 32.
inline void round_row(const float* x, int64_t columns, int8_t* codes, float* steps, float* sums, int64_t distance) {
    constexpr int kVectors = kColumnsPerTile / kLanes;
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the integer
    const Ints sign = broadcast_int(0x80000000u), lowest = bits_of(magic);
    for (int64_t tile = 0; tile < columns / kColumnsPerTile; ++tile, x += kColumnsPerTile, codes += distance * kColumnsPerTile) {
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
            // NaN becomes the bound: of two operands the second wins
            const Floats scaled = smaller(larger(mul(load(x + V * kLanes), inverse), broadcast(-kMostRounded)), broadcast(kMostRounded));
            const Ints rounded = sub_int(bits_of(add(scaled, magic)), lowest);
            total = add_int(total, rounded);
            store_low_bytes(codes + V * kLanes, rounded);
        });
        steps[tile * distance] = largest / kMostRounded;
        sums[tile * distance] = sum_lanes(to_float(total));
    }
}
