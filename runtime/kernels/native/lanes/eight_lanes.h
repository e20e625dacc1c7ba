// Functions that all kernels over eight lanes share. This file has no include guard: each targets/kernels_*.cpp includes it
// inside its own namespace, directly after its lane operations.

#include "lanes/unroll.h"

// Adds the lanes as ((0+4)+(2+6)) + ((1+5)+(3+7)).
MOEC_INLINE float sum_lanes(Floats a) {
    a = add(a, upper<4>(a));
    a = add(a, upper<2>(a));
    return first_lane(add(a, upper<1>(a)));
}

// The largest of eight lanes, none of which is negative.
MOEC_INLINE float max_lanes(Floats a) {
    a = larger(a, upper<4>(a));
    a = larger(a, upper<2>(a));
    return first_lane(larger(a, upper<1>(a)));
}

// Number of elements, from index i on, that fit into one register of Lanes.
template <int Lanes>
MOEC_INLINE int lanes_left(int64_t size, int64_t i) {
    return static_cast<int>(size - i < Lanes ? size - i : Lanes);
}
