// Attention of one layer in one call: products, norms and rotation of q, k and v, storing of k and v, attention, output.
//
// For one token there is little work between the products. Doing all steps here saves about ten calls through the Python
// interpreter per layer. These calls are slow, because the weights have evicted the interpreter from the processor's caches.

#include "attention/attention_layer.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace moec {
namespace {

// Convert to a half float: to nearest, ties to even. Values that are too large become the largest half float; NaN stays NaN.
// The code has no branches, so that compilers can vectorize a loop over it.
inline HalfFloat half_of(float x) {
    constexpr uint32_t kLargest = 0x477FE000u;         // 65504
    constexpr uint32_t kSmallestNormal = 0x38800000u;  // 2^-14
    constexpr uint32_t kInfinity = 0x7F800000u;
    constexpr float kHalf = 0.5f;  // its last place is that of subnormal half floats, so the addition rounds to them
    uint32_t bits, sum_bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits & 0x80000000u, size = bits ^ sign;
    const uint32_t bounded = size < kLargest ? size : kLargest;
    const uint32_t normal = (bounded - 0x38000000u + 0xFFFu + (bounded >> 13 & 1u)) >> 13;
    float value;
    std::memcpy(&value, &bounded, sizeof value);
    const float sum = value + kHalf;
    std::memcpy(&sum_bits, &sum, sizeof sum_bits);
    const uint32_t subnormal = sum_bits - 0x3F000000u;
    uint32_t found = bounded < kSmallestNormal ? subnormal : normal;
    found = size > kInfinity ? 0x7E00u : found;
    return {static_cast<uint16_t>(found | sign >> 16)};
}

void store_row(const float* row, void* cache, bool is_half, int64_t place, int64_t size) {
    if (!is_half) {
        std::memcpy(static_cast<float*>(cache) + place, row, static_cast<size_t>(size) * sizeof(float));
        return;
    }
    HalfFloat* out = static_cast<HalfFloat*>(cache) + place;
    for (int64_t i = 0; i < size; ++i) {
        out[i] = half_of(row[i]);
    }
}

// Rotates the first features of each head. Heads lie head_size floats apart.
bool rotate(const Rotation& rotation, float* features, int64_t tokens, int64_t heads, int64_t head_size,
            const int32_t* positions) {
    return rotation.cos == nullptr || rope({features, rotation.cos, rotation.sin, positions, heads, head_size, rotation.half,
                                            rotation.is_interleaved}, tokens);
}

// Applies norm and rotation to queries or keys, [T, heads, Dh], in place.
bool turn_heads(const AttentionLayerView& layer, const float* norm, float* rows, int64_t tokens, int64_t heads,
                const int32_t* positions) {
    const int64_t size = layer.norms_whole_rows ? heads * layer.head_size : layer.head_size;
    if (norm != nullptr) {
        rms_norm(rows, norm, layer.head_norm_eps, tokens * heads * layer.head_size / size, size, rows);
    }
    return rotate(layer.rotation, rows, tokens, heads, layer.head_size, positions);
}

// mixed *= f(gates), [T, H, Dh] and [T, H] or [T, H Dh]. gates: scratch.
void gate_heads(const AttentionLayerView& layer, int64_t tokens, float* gates, float* mixed) {
    const int64_t count = tokens * layer.gate.rows, features = tokens * layer.heads * layer.head_size;
    layer.is_softplus ? softplus(gates, count) : sigmoid(gates, count);
    for (int64_t i = 0; i < features; ++i) {
        mixed[i] *= gates[i / (features / count)];
    }
}

// Copies `size` floats of each of `count` rows. Strides are in floats.
void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t size, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(to + i * to_stride, from + i * from_stride, static_cast<size_t>(size) * sizeof(float));
    }
}

// Multiplies row h of each token with matrix h, for every head.
// x_stride: floats between the rows of one token. out_stride: floats between its products.
// spare: scratch, at least T (K + N) and H K floats.
bool products_of_heads(const MatrixView* matrices, int64_t heads, const float* x, int64_t x_stride, int64_t tokens, float* out,
                       int64_t out_stride, float* spare) {
    const int64_t columns = matrices[0].columns, rows = matrices[0].rows;
    if (tokens == 1) {
        std::vector<const MatrixView*> views;
        std::vector<float*> outs;
        for (int64_t h = 0; h < heads; ++h) {
            views.push_back(matrices + h);
            outs.push_back(out + h * out_stride);
        }
        copy_rows(x, x_stride, spare, columns, columns, heads);
        return linears_by_row(views.data(), heads, spare, outs.data());
    }
    float* const products[] = {spare + tokens * columns};
    for (int64_t h = 0; h < heads; ++h) {
        const MatrixView* const matrix[] = {matrices + h};
        copy_rows(x + h * x_stride, heads * x_stride, spare, columns, columns, tokens);
        if (!linears(matrix, 1, spare, tokens, products)) {
            return false;
        }
        copy_rows(products[0], rows, out + h * out_stride, heads * out_stride, rows, tokens);
    }
    return true;
}

// Computes queries [T, H, P + R] and the shared vector [T, Q + R] from the normed stream.
// down: scratch, [T, rows of query_down].
bool project(const LatentLayerView& layer, const float* normed, int64_t tokens, float* down, float* queries, float* shared) {
    const bool has_down = layer.query_down != nullptr;
    const MatrixView* const first[] = {has_down ? layer.query_down : &layer.query, &layer.latent_down};
    float* const outs[] = {has_down ? down : queries, shared};
    if (!linears(first, 2, normed, tokens, outs)) {
        return false;
    }
    if (!has_down) {
        return true;
    }
    rms_norm(down, layer.query_down_norm, layer.inner_norm_eps, tokens, layer.query_down->rows, down);
    const MatrixView* const second[] = {&layer.query};
    return linears(second, 1, down, tokens, &queries);
}

}  // namespace

void store_kv(const CacheRows& rows, const KeysAndValues& cache, const int32_t* slots, const int32_t* positions) {
    for (int64_t i = 0; i < rows.tokens * rows.heads; ++i) {
        const int64_t t = i / rows.heads, head = slots[t] * rows.heads + i % rows.heads;
        const int64_t place = (head * cache.context + positions[t]) * rows.head_size;
        store_row(rows.keys + i * rows.head_size, cache.keys, cache.is_half, place, rows.head_size);
        if (rows.values != nullptr) {
            store_row(rows.values + i * rows.head_size, cache.values, cache.is_half, place, rows.head_size);
        }
    }
}

bool attend(const AttentionLayerView& layer, float* hidden, int64_t tokens, const KeysAndValues& cache,
            const TokenPlaces& places) {
    const int64_t size = layer.query.columns, query_size = layer.query.rows, key_size = layer.key.rows;
    const Floats memory = take_floats(tokens * (size + 2 * query_size + 2 * key_size + layer.gate.rows));
    if (memory == nullptr && tokens > 0) {
        return false;
    }
    float* const stream = memory.get();  // the normed stream, and at the end the attention's output
    float* const queries = stream + tokens * size;
    float* const mixed = queries + tokens * query_size;
    float* const keys = mixed + tokens * query_size;
    float* const values = keys + tokens * key_size;
    float* const gates = values + tokens * key_size;

    norm_stream(layer.ends, hidden, tokens, size, stream);
    const MatrixView* matrices[4] = {&layer.query, &layer.key};
    float* rows[4] = {queries, keys};
    int64_t count = 2;
    for (const auto& [matrix, products] : {std::pair{&layer.value, values}, std::pair{&layer.gate, gates}}) {
        if (matrix->rows > 0) {
            matrices[count] = matrix;
            rows[count++] = products;
        }
    }
    if (!linears(matrices, count, stream, tokens, rows)) {
        return false;
    }
    if (layer.value.rows == 0) {
        std::copy(keys, keys + tokens * key_size, values);
    }
    add_bias(queries, layer.biases[0], tokens, query_size);
    add_bias(keys, layer.biases[1], tokens, key_size);
    add_bias(values, layer.biases[2], tokens, key_size);
    if (layer.value_norm != nullptr) {
        rms_norm(values, layer.value_norm, layer.head_norm_eps, tokens * layer.kv_heads, layer.head_size, values);
    }
    if (!turn_heads(layer, layer.query_norm, queries, tokens, layer.heads, places.positions) ||
        !turn_heads(layer, layer.key_norm, keys, tokens, layer.kv_heads, places.positions)) {
        return false;
    }
    store_kv({keys, values, layer.kv_heads, layer.head_size, tokens}, cache, places.slots, places.positions);
    const AttentionCall call{queries,     cache.keys,      cache.values,    cache.is_half, places.slots,  places.positions,
                             mixed,       layer.heads,     layer.kv_heads,  layer.head_size, cache.context, layer.window,
                             layer.scale, layer.sinks,     places.ends,     layer.distance_bias};
    if (!attention(call, tokens)) {
        return false;
    }
    if (layer.gate.rows > 0 && tokens > 0) {
        gate_heads(layer, tokens, gates, mixed);
    }
    return add_output(layer.ends, layer.output, layer.biases[3], mixed, tokens, stream, hidden);
}

bool attend(const LatentLayerView& layer, float* hidden, int64_t tokens, const KeysAndValues& cache,
            const TokenPlaces& places) {
    const MatrixView &key_up = layer.key_up[0], &value_up = layer.value_up[0];
    const int64_t heads = layer.heads, size = layer.output.rows, rank = key_up.rows, plain = key_up.columns;
    const int64_t head_size = layer.query.rows / heads, vector_size = layer.latent_down.rows, rotated = vector_size - rank;
    const int64_t down_size = layer.query_down != nullptr ? layer.query_down->rows : 0, most = std::max(heads, tokens);
    const int64_t spare_size = std::max(most * plain + tokens * rank, most * rank + tokens * value_up.rows);
    const int64_t row = size + down_size + heads * (head_size + 2 * vector_size + value_up.rows) + vector_size;
    const Floats memory = take_floats(tokens * row + spare_size);
    if (memory == nullptr && tokens > 0) {
        return false;
    }
    float* const stream = memory.get();  // the normed stream, and at the end the attention's output
    float* const down = stream + tokens * size;
    float* const heads_of_query = down + tokens * down_size;
    float* const shared = heads_of_query + tokens * heads * head_size;
    float* const queries = shared + tokens * vector_size;
    float* const mixed = queries + tokens * heads * vector_size;
    float* const seen = mixed + tokens * heads * vector_size;
    float* const spare = seen + tokens * heads * value_up.rows;

    norm_stream(layer.ends, hidden, tokens, size, stream);
    if (!project(layer, stream, tokens, down, heads_of_query, shared) ||
        !rotate(layer.rotation, heads_of_query + plain, tokens, heads, head_size, places.positions) ||
        !products_of_heads(layer.key_up, heads, heads_of_query, head_size, tokens, queries, vector_size, spare)) {
        return false;
    }
    copy_rows(heads_of_query + plain, head_size, queries + rank, vector_size, rotated, tokens * heads);
    for (int64_t t = 0; t < tokens; ++t) {
        float* const vector = shared + t * vector_size;
        rms_norm(vector, layer.latent_norm, layer.inner_norm_eps, 1, rank, vector);
    }
    if (!rotate(layer.rotation, shared + rank, tokens, 1, vector_size, places.positions)) {
        return false;
    }
    store_kv({shared, nullptr, 1, vector_size, tokens}, cache, places.slots, places.positions);
    const AttentionCall call{queries,     cache.keys, cache.keys,  cache.is_half, places.slots,  places.positions,
                             mixed,       heads,      1,           vector_size,   cache.context, 0,
                             layer.scale, nullptr,    places.ends, nullptr};
    return attention(call, tokens) &&
           products_of_heads(layer.value_up, heads, mixed, vector_size, tokens, seen, value_up.rows, spare) &&
           add_output(layer.ends, layer.output, nullptr, seen, tokens, stream, hidden);
}

}  // namespace moec
