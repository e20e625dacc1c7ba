// Rows of the cache of keys and values, whose elements are floats or half floats, written once over the lanes of an instruction
// set. Included inside its namespace, after its lanes; no include guard, for that reason.
//
// A half float is brought to a float exactly, so both caches compute the same on what the narrower one holds.

MOEC_INLINE Floats load_cached(const float* p) { return load(p); }
MOEC_INLINE Floats load_cached(const HalfFloat* p) { return load_half(reinterpret_cast<const uint8_t*>(p)); }
MOEC_INLINE Floats load_cached_partial(const float* p, int n) { return load_partial(p, n); }
MOEC_INLINE Floats load_cached_partial(const HalfFloat* p, int n) {
    HalfFloat whole[kLanes] = {};
    std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(HalfFloat));
    return load_cached(whole);
}

// How far ahead of what is read lines are asked for: keys and values of a head are one run of memory each, and the processor's own
// prefetching ends at every page.
template <class Element>
constexpr int64_t kCachedAhead = 4096 / int64_t{sizeof(Element)};

// Asks for the lines of so many elements.
template <class Element>
MOEC_INLINE void ask_for_cached(const Element* p, int64_t count) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(p);
    for (int64_t i = 0; i < count * int64_t{sizeof(Element)}; i += kPlaneBytes) {
        prefetch(bytes + i);
    }
}
