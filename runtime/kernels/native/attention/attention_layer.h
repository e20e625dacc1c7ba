// Attention of one layer as a single operation, from the residual stream back to the residual stream. Start here: `attend`
// calls the products (operations/operations.h), stores keys and values, and calls the kernels of cached_attention.h.

#pragma once

#include <cstdint>

#include "attention/stream_ends.h"

namespace moec {

// Keys and values of tokens, to be stored in the cache. In a cache of half floats each value becomes the nearest half float,
// at most the largest one.
struct CacheRows {
    const float* keys;    // [T, Hkv, Dh]
    const float* values;  // [T, Hkv, Dh]; null: keys serve as values
    int64_t heads, head_size, tokens;
};

// The cache, [S, Hkv, C, Dh] each, floats or half floats.
struct KeysAndValues {
    void* keys;
    void* values;
    bool is_half;
    int64_t context;
};

void store_kv(const CacheRows& rows, const KeysAndValues& cache, const int32_t* slots, const int32_t* positions);

// Tables of a rotary embedding. Null: no rotation.
struct Rotation {
    const float* cos;  // [C, half]
    const float* sin;
    int64_t half;
    bool is_interleaved;
};

// Grouped heads with keys and values of their own. Null: the model has no such part.
struct AttentionLayerView {
    StreamEnds ends;
    MatrixView query, key, value, output;  // value without rows: values are the products of the keys
    const float* biases[4];   // of query, key, value and output
    const float* query_norm;  // [Dh], or [H Dh] with norms_whole_rows
    const float* key_norm;    // [Dh], or [Hkv Dh]
    const float* value_norm;  // [Dh]
    bool norms_whole_rows;
    float head_norm_eps;
    Rotation rotation;
    int64_t heads, kv_heads, head_size;
    float scale;
    int64_t window;              // 0: no window
    const float* sinks;          // [H]
    const float* distance_bias;  // [H, 2 C - 1]
    MatrixView gate;             // [H, D], or [H Dh, D]; no rows: the output is not gated
    bool is_softplus;            // the function of the gate, else a sigmoid
};

// Latent attention: the keys and values of all heads come from one vector, and only this vector is cached.
// P plain features, R rotated features, Q latent features, V value features.
struct LatentLayerView {
    StreamEnds ends;
    const MatrixView* query_down;  // may be null
    const float* query_down_norm;
    MatrixView query;            // [H (P + R), D], or [H (P + R), rows of query_down]
    MatrixView latent_down;      // [Q + R, D]
    const float* latent_norm;    // [Q]
    float inner_norm_eps;
    const MatrixView* key_up;    // one per head, [Q, P]
    const MatrixView* value_up;  // one per head, [V, Q]
    MatrixView output;           // [D, H V]
    Rotation rotation;
    int64_t heads;
    float scale;
};

// Where tokens are in the cache. slots, positions: [T].
// ends: [T], end of the positions that each token sees; null: its own position + 1.
struct TokenPlaces {
    const int32_t* slots;
    const int32_t* positions;
    const int32_t* ends;
};

// hidden += residual_scale * output(attention(norm(hidden))), [T, D]. Stores keys and values in the cache.
// Gives the same bits as the single operations one after the other. Returns false, with hidden unchanged, without memory.
bool attend(const AttentionLayerView& layer, float* hidden, int64_t tokens, const KeysAndValues& cache,
            const TokenPlaces& places);
// The same for latent attention. The cache has one array, [S, 1, C, Q + R].
bool attend(const LatentLayerView& layer, float* hidden, int64_t tokens, const KeysAndValues& cache, const TokenPlaces& places);

}  // namespace moec
