// Layers with a recurrent state in one call each. A token's bits depend on the tokens before it alone: all sums of a step have
// one order, and a pass over many tokens takes the steps one after the other.

#include "attention/recurrent_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "operations/split_work.h"

namespace moec {
namespace {

// Adjacent tokens of one slot.
struct Run {
    int64_t first, last, slot;
    int64_t kept;  // number of its tokens after which the state is kept; 0: it is not
};

std::vector<Run> runs_of(const RecurrentTokens& tokens) {
    std::vector<Run> runs;
    for (int64_t t = 0; t < tokens.count; ++t) {
        const int64_t slot = tokens.slots[t];
        if (t == 0 || slot != runs.back().slot) {
            const int64_t kept = int64_t{tokens.kept_at[slot]} - tokens.positions[t];
            runs.push_back({t, t, slot, kept});
        }
        ++runs.back().last;
    }
    for (Run& run : runs) {
        run.kept = run.kept > 0 && run.kept <= run.last - run.first ? run.kept : 0;
    }
    return runs;
}

struct Convolution {
    const float* taps;  // [K, D]
    int64_t tap_count, size;

    int64_t state_rows() const { return tap_count - 1; }
    int64_t state_size() const { return state_rows() * size; }
    // Row `at` of a text that continues the state; negative rows lie in the state.
    const float* row(const float* x, const float* state, const Run& run, int64_t at) const {
        return at >= 0 ? x + (run.first + at) * size : state + (state_rows() + at) * size;
    }
};

// Copies the rows before row `end` of a run to `out`, which may be `state`.
void save_rows(const Convolution& convolution, const float* x, const float* state, const Run& run, int64_t end, float* out) {
    const size_t bytes = static_cast<size_t>(convolution.size) * sizeof(float);
    for (int64_t i = 0; i < convolution.state_rows(); ++i) {  // a row moves towards the front, so the order is safe
        const float* row = convolution.row(x, state, run, end - convolution.state_rows() + i);
        std::memmove(out + i * convolution.size, row, bytes);
    }
}

// out = convolution(x), [T, D], and the states move on. x and out must not overlap.
void convolve(const Convolution& convolution, const float* x, const std::vector<Run>& runs, const SlotStates& states, float* out) {
    const KernelTable& kernels = active_kernels();
    for (const Run& run : runs) {
        float* const state = states.live + run.slot * convolution.state_size();
        const int64_t count = run.last - run.first;
        const double flops = 2.0 * static_cast<double>(count * convolution.size * convolution.tap_count);
        split_tokens(count, threads_for(flops), [&](int64_t begin, int64_t end, int) {
            const float* rows[kMostTaps];
            for (int64_t at = begin; at < end; ++at) {
                for (int64_t j = 0; j < convolution.tap_count; ++j) {
                    rows[j] = convolution.row(x, state, run, at - convolution.state_rows() + j);
                }
                kernels.convolve(rows, convolution.taps, convolution.tap_count, convolution.size,
                                 out + (run.first + at) * convolution.size);
            }
        });
        if (run.kept > 0) {
            save_rows(convolution, x, state, run, run.kept, states.kept + run.slot * convolution.state_size());
        }
        save_rows(convolution, x, state, run, count, state);
    }
}

// x = silu(x), for rows of each token.
void silu(float* x, int64_t tokens, int64_t size) {
    const KernelTable& kernels = active_kernels();
    split_tokens(tokens, threads_for(kFlopsPerExp * static_cast<double>(tokens * size)), [&](int64_t first, int64_t last, int) {
        kernels.silu(x + first * size, (last - first) * size, x + first * size);
    });
}

// The steps of all runs, split by heads.
void delta_rule(const DeltaCall& call, const std::vector<Run>& runs, const SlotStates& states) {
    const KernelTable& kernels = active_kernels();
    const int64_t blocks = call.value_size / kStateColumns, block_size = call.key_size * kStateColumns;
    int64_t tokens = 0;
    for (const Run& run : runs) {
        tokens += run.last - run.first;
    }
    const double flops = 8.0 * static_cast<double>(tokens * call.value_heads * call.value_size * call.key_size);
    const int64_t heads = call.value_heads;
    parallel_for(static_cast<int64_t>(runs.size()) * heads, threads_for(flops), [&](int64_t item, int) {
        const Run& run = runs[static_cast<size_t>(item / heads)];
        const int64_t head = item % heads;
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t place = ((run.slot * heads + head) * blocks + block) * block_size;
            float* const state = states.live + place;
            int64_t first = run.first;
            if (run.kept > 0) {
                first += run.kept;
                kernels.delta_rule(call, head, block, run.first, first, state);
                std::copy(state, state + block_size, states.kept + place);
            }
            if (first < run.last) {
                kernels.delta_rule(call, head, block, first, run.last, state);
            }
        }
    });
}

// Steps to decays, [T, Hv] in place.
void decay_of_steps(const DeltaLayerView& layer, int64_t tokens, float* steps) {
    const int64_t count = tokens * layer.value_heads;
    for (int64_t i = 0; i < count; ++i) {
        steps[i] += layer.step_bias[i % layer.value_heads];
    }
    softplus(steps, count);
    for (int64_t i = 0; i < count; ++i) {
        steps[i] *= -layer.decay_rate[i % layer.value_heads];
    }
    active_kernels().exp(steps, count, steps);
}

// Copies columns [first, first + count) of rows [T, size] to rows of their own.
void take_columns(const float* rows, int64_t size, int64_t first, int64_t count, int64_t tokens, float* out) {
    for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(out + t * count, rows + t * size + first, static_cast<size_t>(count) * sizeof(float));
    }
}

}  // namespace

bool mix(const ConvolutionLayerView& layer, float* hidden, const SlotStates& rows, const RecurrentTokens& tokens) {
    const int64_t count = tokens.count, size = layer.output.rows;
    const Floats memory = take_floats(count * 6 * size);
    if (memory == nullptr && count > 0) {
        return false;
    }
    float* const stream = memory.get();  // the normed stream, and at the end the layer's output
    float* const parts = stream + count * size;
    float* const gated = parts + count * 3 * size;
    float* const mixed = gated + count * size;
    norm_stream(layer.ends, hidden, count, size, stream);
    const MatrixView* const matrices[] = {&layer.input};
    float* const outs[] = {parts};
    if (!linears(matrices, 1, stream, count, outs)) {
        return false;
    }
    for (int64_t t = 0; t < count; ++t) {
        const float* const part = parts + t * 3 * size;
        for (int64_t i = 0; i < size; ++i) {
            gated[t * size + i] = part[i] * part[2 * size + i];
        }
    }
    convolve({layer.taps, layer.tap_count, size}, gated, runs_of(tokens), rows, mixed);
    for (int64_t t = 0; t < count; ++t) {
        const float* const part = parts + t * 3 * size + size;
        for (int64_t i = 0; i < size; ++i) {
            mixed[t * size + i] *= part[i];
        }
    }
    return add_output(layer.ends, layer.output, nullptr, mixed, count, stream, hidden);
}

bool mix(const DeltaLayerView& layer, float* hidden, const SlotStates& rows, const SlotStates& states,
         const RecurrentTokens& tokens) {
    const int64_t count = tokens.count, size = layer.output.rows, heads = layer.value_heads;
    const int64_t keys = layer.key.rows, values = layer.value.rows, features = 2 * keys + values;
    const Floats memory = take_floats(count * (size + 2 * features + 2 * values + 2 * heads));
    if (memory == nullptr && count > 0) {
        return false;
    }
    float* const stream = memory.get();
    float* const inputs = stream + count * size;        // [T, Cn]; before it, the products one after the other
    float* const convolved = inputs + count * features;
    float* const gates = convolved + count * features;
    float* const mixed = gates + count * values;
    float* const rates = mixed + count * values;
    float* const decays = rates + count * heads;
    norm_stream(layer.ends, hidden, count, size, stream);
    float* const products[] = {convolved, convolved + count * keys, convolved + 2 * count * keys, gates, rates, decays};
    const MatrixView* const matrices[] = {&layer.query, &layer.key, &layer.value, &layer.gate, &layer.rate, &layer.step};
    if (!linears(matrices, 6, stream, count, products)) {
        return false;
    }
    for (int64_t t = 0; t < count; ++t) {
        float* const row = inputs + t * features;
        std::copy(products[0] + t * keys, products[0] + (t + 1) * keys, row);
        std::copy(products[1] + t * keys, products[1] + (t + 1) * keys, row + keys);
        std::copy(products[2] + t * values, products[2] + (t + 1) * values, row + 2 * keys);
    }
    const std::vector<Run> runs = runs_of(tokens);
    convolve({layer.taps, layer.tap_count, features}, inputs, runs, rows, convolved);
    silu(convolved, count, features);
    float* const query = inputs;
    float* const key = query + count * keys;
    float* const value = key + count * keys;
    take_columns(convolved, features, 0, keys, count, query);
    take_columns(convolved, features, keys, keys, count, key);
    take_columns(convolved, features, 2 * keys, values, count, value);
    // A norm whose weight is 1 / sqrt(Dk) and whose eps is divided by Dk divides by the length.
    const float eps = 1e-6f / static_cast<float>(layer.key_size);
    rms_norm(query, layer.query_scale, eps, count * layer.key_heads, layer.key_size, query);
    rms_norm(key, layer.key_scale, eps, count * layer.key_heads, layer.key_size, key);
    sigmoid(rates, count * heads);
    decay_of_steps(layer, count, decays);
    delta_rule({query, key, value, decays, rates, mixed, layer.key_heads, heads, layer.key_size, layer.value_size}, runs, states);
    rms_norm(mixed, layer.norm, layer.norm_eps, count * heads, layer.value_size, mixed);
    silu(gates, count, values);
    for (int64_t i = 0; i < count * values; ++i) {
        mixed[i] *= gates[i];
    }
    return add_output(layer.ends, layer.output, nullptr, mixed, count, stream, hidden);
}

}  // namespace moec
