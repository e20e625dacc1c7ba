// Loops whose count is known at compile time. This file has no include guard: it is included inside the namespace of an
// instruction set.

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
