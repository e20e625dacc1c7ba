// Loads of rows of the cache of keys and values: floats or half floats. This file has no include guard: each
// targets/kernels_*.cpp includes it inside its own namespace, after its lanes.
//
// A half float is converted to a float exactly. So both caches give the same result for values that both can hold.

MOEC_INLINE Floats load_cached(const float* p) { return load(p); }
MOEC_INLINE Floats load_cached(const HalfFloat* p) { return load_half(reinterpret_cast<const uint8_t*>(p)); }
MOEC_INLINE Floats load_cached_partial(const float* p, int n) { return load_partial(p, n); }
MOEC_INLINE Floats load_cached_partial(const HalfFloat* p, int n) {
    HalfFloat whole[kLanes] = {};
    std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(HalfFloat));
    return load_cached(whole);
}

// Distance of prefetching, in elements. Keys and values of a head are one range of memory each, and hardware prefetching stops
// at every page.
template <class Element>
constexpr int64_t kCachedAhead = 4096 / int64_t{sizeof(Element)};

// Prefetch the cache lines of `count` elements.
template <class Element>
MOEC_INLINE void ask_for_cached(const Element* p, int64_t count) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(p);
    for (int64_t i = 0; i < count * int64_t{sizeof(Element)}; i += kPlaneBytes) {
        prefetch(bytes + i);
    }
}
