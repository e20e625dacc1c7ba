// Scratch memory of one thread.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <limits>

namespace moec {

// Memory that is kept from call to call and only grows.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data_); }

    // Returns at least `count` uninitialized floats, or null.
    float* take(int64_t count) {
        if (count > capacity_) {
            if (static_cast<uint64_t>(count) > std::numeric_limits<size_t>::max() / sizeof(float)) {
                return nullptr;
            }
            std::free(data_);
            data_ = static_cast<float*>(std::malloc(static_cast<size_t>(count) * sizeof(float)));
            capacity_ = data_ != nullptr ? count : 0;
        }
        return data_;
    }

  private:
    float* data_ = nullptr;
    int64_t capacity_ = 0;
};

}  // namespace moec
