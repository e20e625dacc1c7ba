// Arguments of attention calls from Python, with the checks that all of them share.

#pragma once

#include <algorithm>
#include <memory>
#include <string>

#include "python/arguments.h"
#include "attention/attention_layer.h"

namespace moec {

// An array, or None.
class MaybeArray {
  public:
    MaybeArray() = default;
    MaybeArray(nb::handle object, const char* name, Kind kind, int rank)
        : array_(object.is_none() ? nullptr : std::make_unique<Array>(object, name, kind, rank)) {}

    explicit operator bool() const { return array_ != nullptr; }
    const Array* operator->() const { return array_.get(); }
    template <class Value>
    const Value* data() const {
        return array_ == nullptr ? nullptr : array_->data<const Value>();
    }
    void expect(std::initializer_list<int64_t> shape) const {
        if (array_ != nullptr) {
            array_->expect(shape);
        }
    }

  private:
    std::unique_ptr<Array> array_;
};

// Keys and values, [S, Hkv, C, Dh]. Half floats if k_cache is an array of half floats, else floats.
struct Cache {
    Kind kind;
    Array keys, values;

    Cache(nb::handle k_cache, nb::handle v_cache, Access access)
        : kind(is_half(k_cache) ? Kind::kFloat16 : Kind::kFloat32),
          keys(k_cache, "k_cache", kind, 4, access),
          values(v_cache, "v_cache", kind, 4, access) {
        values.expect({keys.size(0), keys.size(1), keys.size(2), keys.size(3)});
    }

    int64_t heads() const { return keys.size(1); }
    int64_t context() const { return keys.size(2); }
    int64_t head_size() const { return keys.size(3); }
    KeysAndValues view() const { return {keys.data<void>(), values.data<void>(), kind == Kind::kFloat16, context()}; }
};

// Where tokens are in the cache. ends: end of the positions that each token sees; None: its own position + 1.
struct Places {
    Array slots, positions;
    MaybeArray ends;

    Places(nb::handle slots_object, nb::handle positions_object, nb::handle ends_object, const Cache& cache, int64_t tokens)
        : slots(slots_object, "slots", Kind::kInt32, 1),
          positions(positions_object, "positions", Kind::kInt32, 1),
          ends(ends_object, "ends", Kind::kInt32, 1) {
        slots.expect({tokens});
        positions.expect({tokens});
        slots.expect_indices(cache.keys.size(0));
        positions.expect_indices(cache.context());
    }

    TokenPlaces view() const { return {slots.data<const int32_t>(), positions.data<const int32_t>(), ends.data<int32_t>()}; }

    void check_ends(const Cache& cache, int64_t window) const {
        if (!ends) {
            return;
        }
        const int64_t tokens = slots.size(0);
        ends.expect({tokens});
        ends->expect_indices(cache.context() + 1);
        const int32_t* const all = ends.data<int32_t>();
        if (window != 0 || std::any_of(all, all + tokens, [](int32_t end) { return end < 1; })) {
            refuse("ends: expected at least 1, and no window");
        }
    }
};

inline void expect_window(int64_t window) {
    if (window < 0) {
        refuse("window: expected 0 or more, found " + std::to_string(window));
    }
}

inline void expect_rotated(int64_t rotated, int64_t head_size) {
    if (rotated > head_size / 2) {
        refuse("cos: expected at most " + std::to_string(head_size / 2) + " columns, found " + std::to_string(rotated));
    }
}

}  // namespace moec
