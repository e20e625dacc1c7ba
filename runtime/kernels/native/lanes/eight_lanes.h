// What the kernels written over eight lanes share. Included first inside the namespace of an instruction set, after its lane
// operations; no include guard, for that reason.

template <int Value>
struct Index {
    static constexpr int value = Value;
};

template <int Count, int First = 0, class Body>
MOEC_INLINE void unroll(const Body& body) {
    if constexpr (First < Count) {
        body(Index<First>{});
        unroll<Count, First + 1>(body);
    }
}

// Lanes are added as ((0+4)+(2+6)) + ((1+5)+(3+7)).
MOEC_INLINE float sum_lanes(Floats a) {
    a = add(a, upper<4>(a));
    a = add(a, upper<2>(a));
    return first_lane(add(a, upper<1>(a)));
}

// The largest lane of eight that are not negative.
MOEC_INLINE float max_lanes(Floats a) {
    a = larger(a, upper<4>(a));
    a = larger(a, upper<2>(a));
    return first_lane(larger(a, upper<1>(a)));
}

// Elements from i on that one register of Lanes takes.
template <int Lanes>
MOEC_INLINE int lanes_left(int64_t size, int64_t i) {
    return static_cast<int>(size - i < Lanes ? size - i : Lanes);
}
