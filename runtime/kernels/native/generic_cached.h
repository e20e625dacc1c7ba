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
