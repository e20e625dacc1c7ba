// Attention of a layer from the residual stream to the residual stream, as one operation.

#pragma once

#include <cstdint>

#include "experts/operations.h"

namespace moec {

// Rows that a token leaves in the cache of its slot. A float becomes the nearest half float, the largest one at most.
struct CacheRows {
    const float* keys;    // [T, Hkv, Dh]
    const float* values;  // [T, Hkv, Dh], null where keys are all there is
    int64_t heads, head_size, tokens;
};

// [S, Hkv, C, Dh], floats or half floats.
struct KeysAndValues {
    void* keys;
    void* values;
    bool is_half;
    int64_t context;
};

void store_kv(const CacheRows& rows, const KeysAndValues& cache, const int32_t* slots, const int32_t* positions);

// Between the residual stream and an attention. norm_bias: makes it a layer norm, may be null.
struct StreamEnds {
    const float* norm;       // [D]
    const float* norm_bias;  // [D]
    float norm_eps;
    float residual_scale;
};

// Null tables: nothing is turned.
struct Rotation {
    const float* cos;  // [C, half]
    const float* sin;
    int64_t half;
    bool is_interleaved;
};

// Grouped heads with their own keys and values. Null: the model has none of it.
struct AttentionLayerView {
    StreamEnds ends;
    MatrixView query, key, value, output;
    const float* biases[4];   // of the products, in their order
    const float* query_norm;  // [Dh], or [H Dh] with norms_whole_rows
    const float* key_norm;    // [Dh], or [Hkv Dh]
    bool norms_whole_rows;
    float head_norm_eps;
    Rotation rotation;
    int64_t heads, kv_heads, head_size;
    float scale;
    int64_t window;              // 0: no window
    const float* sinks;          // [H]
    const float* distance_bias;  // [H, 2 C - 1]
};

// Heads whose keys and values come from one vector, which alone is cached. P plain, R rotated, Q latent, V value features.
struct LatentLayerView {
    StreamEnds ends;
    const MatrixView* query_down;  // may be null
    const float* query_down_norm;
    MatrixView query;            // [H (P + R), D], or on what query_down leaves
    MatrixView latent_down;      // [Q + R, D]
    const float* latent_norm;    // [Q]
    float inner_norm_eps;
    const MatrixView* key_up;    // of each head, [Q, P]
    const MatrixView* value_up;  // of each head, [V, Q]
    MatrixView output;           // [D, H V]
    Rotation rotation;
    int64_t heads;
    float scale;
};

// Where tokens stand: slots and positions, [T]. ends: where what they see ends, if not with themselves, may be null.
struct TokenPlaces {
    const int32_t* slots;
    const int32_t* positions;
    const int32_t* ends;
};

// hidden += residual_scale * output(attention(norm(hidden))), [T, D], with keys and values stored on the way: the bits of the
// single operations one after the other. False, with hidden as it was, if there is no memory.
bool attend(const AttentionLayerView& layer, float* hidden, int64_t tokens, const KeysAndValues& cache, const TokenPlaces& places);
// The same; the cache has one array, [S, 1, C, Q + R].
bool attend(const LatentLayerView& layer, float* hidden, int64_t tokens, const KeysAndValues& cache, const TokenPlaces& places);

}  // namespace moec
