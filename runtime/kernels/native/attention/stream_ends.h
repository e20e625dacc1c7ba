// How a layer of attention, or of a recurrent state, meets the residual stream: the norm before it, the norm and the sum after
// it, and the memory of its steps.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "operations/operations.h"

namespace moec {

// The two connections of a layer to the residual stream: the norm before it, and the scaled sum after it.
// norm_bias: if given, the norm is a layer norm instead of an RMS norm; may be null.
// after_norm: of an RMS norm before the sum; may be null.
struct StreamEnds {
    const float* norm;       // [D]
    const float* norm_bias;   // [D]
    const float* after_norm;  // [D]
    float norm_eps;
    float residual_scale;
};

inline void add_bias(float* rows, const float* bias, int64_t tokens, int64_t size) {
    for (int64_t t = 0; bias != nullptr && t < tokens; ++t) {
        for (int64_t i = 0; i < size; ++i) {
            rows[t * size + i] += bias[i];
        }
    }
}

// hidden += scale * rows. The product is rounded before the sum.
inline void add_rows(const float* rows, float scale, int64_t count, float* hidden) {
    for (int64_t i = 0; i < count; ++i) {
        hidden[i] += scale * rows[i];
    }
}

struct Freed {
    void operator()(float* memory) const { std::free(memory); }
};
using Floats = std::unique_ptr<float[], Freed>;

// Returns uninitialized floats, or null. They are freed after each call, because the expert cache uses this memory between
// passes.
inline Floats take_floats(int64_t count) {
    return Floats(static_cast<float*>(std::malloc(static_cast<size_t>(count) * sizeof(float))));
}

inline void norm_stream(const StreamEnds& ends, const float* hidden, int64_t tokens, int64_t size, float* out) {
    if (ends.norm_bias != nullptr) {
        layer_norm(hidden, ends.norm, ends.norm_bias, ends.norm_eps, tokens, size, out);
    } else {
        rms_norm(hidden, ends.norm, ends.norm_eps, tokens, size, out);
    }
}

// hidden += residual_scale * norm(x W^T + bias). rows: [T, D], scratch.
inline bool add_output(const StreamEnds& ends, const MatrixView& output, const float* bias, const float* x, int64_t tokens,
                float* rows, float* hidden) {
    const MatrixView* const matrices[] = {&output};
    float* const outs[] = {rows};
    if (!linears(matrices, 1, x, tokens, outs)) {
        return false;
    }
    add_bias(rows, bias, tokens, output.rows);
    if (ends.after_norm != nullptr) {
        rms_norm(rows, ends.after_norm, ends.norm_eps, tokens, output.rows, rows);
    }
    add_rows(rows, ends.residual_scale, tokens * output.rows, hidden);
    return true;
}

}  // namespace moec
