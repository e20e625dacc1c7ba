// An emulation of lanes/bfloat_lanes.h by loops over sixteen numbers. It defines the same names and is included instead. No
// include guard, because it is included inside a namespace.

struct Sums {
    float of[16];
};
struct Pairs {
    uint16_t of[16][2];
};

inline Sums no_sums() { return Sums{}; }
inline void store_sums(float* p, const Sums& a) { std::memcpy(p, a.of, sizeof a.of); }
inline void store_pairs(uint16_t* p, const Pairs& a) { std::memcpy(p, a.of, sizeof a.of); }
inline Pairs broadcast_pair(const uint16_t* p) {
    Pairs found;
    for (auto& pair : found.of) {
        std::memcpy(pair, p, sizeof pair);
    }
    return found;
}
inline Pairs load_last_column(const uint8_t* p) {
    Pairs found{};
    for (int row = 0; row < 16; ++row) {
        std::memcpy(&found.of[row][0], p + 2 * row, sizeof(uint16_t));
    }
    return found;
}
inline Pairs load_columns(const uint8_t* p) {
    Pairs found = load_last_column(p);
    const Pairs second = load_last_column(p + 32);
    for (int row = 0; row < 16; ++row) {
        found.of[row][1] = second.of[row][0];
    }
    return found;
}

#include "emulated_bfloats.h"

inline Sums add_pairs(Sums sum, const Pairs& a, const Pairs& b) {
    for (int lane = 0; lane < 16; ++lane) {
        sum.of[lane] = fma_flushed(a.of[lane][1], b.of[lane][1], sum.of[lane]);
        sum.of[lane] = fma_flushed(a.of[lane][0], b.of[lane][0], sum.of[lane]);
    }
    return sum;
}
inline void round_to_bfloats(const float* x, int count, uint16_t* out) {
    for (int i = 0; i < 16; ++i) {
        out[i] = i < count ? rounded_to_bfloat(x[i]) : uint16_t{0};
    }
}
