// Layers whose memory of earlier tokens is a state of fixed size, as single operations from the residual stream back to the
// residual stream: a short convolution between two gates, and the gated delta rule. Start here: `mix` calls the products
// (operations/operations.h) and the kernels of recurrent_kernels.h.
// Specification: runtime/kernels/recurrent_layers.py.

#pragma once

#include <cstdint>

#include "attention/stream_ends.h"

namespace moec {

constexpr int64_t kMostTaps = 16;

// A state of every slot, and the one that is kept for a return to an earlier position.
struct SlotStates {
    float* live;
    float* kept;
};

// The tokens of a pass. The tokens of a slot are adjacent, and their positions follow each other and the state.
// kept_at: [S], number of positions after which a state is kept.
struct RecurrentTokens {
    const int32_t* slots;      // [T]
    const int32_t* positions;  // [T]
    const int32_t* kept_at;
    int64_t count;
};

// out(C * convolution(B * x)) with B, C, x = input(norm(hidden)).
struct ConvolutionLayerView {
    StreamEnds ends;
    MatrixView input;   // [3 D, D]
    const float* taps;  // [K, D], oldest first
    int64_t tap_count;
    MatrixView output;  // [D, D]
};

// The gated delta rule. Queries, keys and values pass a convolution and SiLU; queries and keys are then scaled to length one.
// Cn = 2 Hk Dk + Hv Dv features of the convolution.
struct DeltaLayerView {
    StreamEnds ends;
    MatrixView query, key, value;     // [Hk Dk, D] twice, [Hv Dv, D]
    MatrixView gate, rate, step;      // [Hv Dv, D], [Hv, D] twice
    const float* taps;                // [K, Cn], oldest first
    int64_t tap_count;
    const float* decay_rate;          // [Hv], a state decays by e^(-decay_rate softplus(step + step_bias))
    const float* step_bias;           // [Hv]
    const float *query_scale, *key_scale;  // [Dk], weights of the norms that make the lengths
    const float* norm;                // [Dv]
    float norm_eps;
    MatrixView output;                // [D, Hv Dv]
    int64_t key_heads, value_heads, key_size, value_size;
};

// hidden += residual_scale * layer(norm(hidden)), [T, D]. rows: the last K - 1 inputs of the convolution, [S, K - 1, D].
// Returns false, with hidden and states undefined, without memory.
bool mix(const ConvolutionLayerView& layer, float* hidden, const SlotStates& rows, const RecurrentTokens& tokens);
// The same. rows: [S, K - 1, Cn]. states: [S, Hv, Dv / 16, Dk, 16].
bool mix(const DeltaLayerView& layer, float* hidden, const SlotStates& rows, const SlotStates& states,
         const RecurrentTokens& tokens);

}  // namespace moec
