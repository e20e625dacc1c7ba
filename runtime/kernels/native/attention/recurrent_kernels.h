// Kernels of layers with a recurrent state, feature by feature, written once over eight or sixteen lanes: causal convolutions
// of a few taps, and the gated delta rule. This file has no include guard: each targets/kernels_*.cpp includes it inside its
// own namespace, after attention/weighing.h.
//
// - A feature of the result depends on this feature alone, so the number of lanes decides no bit.
// - Sums over key features are two sums, of even and of odd features, in order; then both are added.
// - Accuracy class: bit-equal across instruction sets, thread counts and batches.

// out[d] = sum over taps j, in order, of taps[j, d] * rows[j][d]. taps: [K, D].
inline void convolve(const float* const* rows, const float* taps, int64_t count, int64_t size, float* out) {
    for (int64_t d = 0; d < size; d += kLanes) {
        const int lanes = lanes_left<kLanes>(size, d);
        Floats sum = mul(load_partial(taps + d, lanes), load_partial(rows[0] + d, lanes));
        for (int64_t j = 1; j < count; ++j) {
            sum = fma(load_partial(taps + j * size + d, lanes), load_partial(rows[j] + d, lanes), sum);
        }
        store_partial(out + d, sum, lanes);
    }
}

constexpr int kStateVectors = kStateColumns / kLanes;

// Adds key * row to the sums.
MOEC_INLINE void add_row_recalled(float key, const float* row, Floats* sums) {
    unroll<kStateVectors>([&](auto v) MOEC_INLINE_LAMBDA {
        constexpr int V = decltype(v)::value;
        sums[V] = fma(broadcast(key), load(row + V * kLanes), sums[V]);
    });
}

// Adds key[r] * state[r] for all features r of a key, into a sum of even and one of odd features.
MOEC_INLINE void add_recalled(const float* key, const float* state, int64_t size, Floats (&sums)[2][kStateVectors]) {
    int64_t r = 0;
    for (; r + 2 <= size; r += 2) {
        add_row_recalled(key[r], state + r * kStateColumns, sums[0]);
        add_row_recalled(key[r + 1], state + (r + 1) * kStateColumns, sums[1]);
    }
    if (r < size) {
        add_row_recalled(key[r], state + r * kStateColumns, sums[0]);
    }
}

// One feature r of the keys: state[r] = state[r] * decay + key[r] * change. Adds query[r] * state[r] to what is read, and with
// HasNext next_key[r] * state[r] to what the next key recalls.
template <bool HasNext>
MOEC_INLINE void change_row(float* state, Floats decay, float key, float query, float next_key, const Floats* change,
                            Floats* read, Floats* recalled) {
    unroll<kStateVectors>([&](auto v) MOEC_INLINE_LAMBDA {
        constexpr int V = decltype(v)::value;
        const Floats row = fma(broadcast(key), change[V], mul(load(state + V * kLanes), decay));
        store(state + V * kLanes, row);
        read[V] = fma(broadcast(query), row, read[V]);
        if constexpr (HasNext) {
            recalled[V] = fma(broadcast(next_key), row, recalled[V]);
        }
    });
}

// The step of one token in kStateColumns features of the values. recalled: what its key recalls, and then the next one's.
template <bool HasNext>
MOEC_INLINE void delta_step(const DeltaCall& call, int64_t head, int64_t block, int64_t token, float* state,
                            Floats (&recalled)[2][kStateVectors]) {
    const int64_t size = call.key_size, row = token * call.value_heads + head, place = row * call.value_size + block * kStateColumns;
    const int64_t key_row = token * call.key_heads + head / (call.value_heads / call.key_heads);
    const float *key = call.k + key_row * size, *query = call.q + key_row * size;
    const float* next_key = key + call.key_heads * size;
    const Floats decay = broadcast(call.decay[row]), rate = broadcast(call.rate[row]);
    Floats change[kStateVectors], read[2][kStateVectors];
    unroll<kStateVectors>([&](auto v) MOEC_INLINE_LAMBDA {
        constexpr int V = decltype(v)::value;
        const Floats known = mul(add(recalled[0][V], recalled[1][V]), decay);
        change[V] = mul(sub(load(call.v + place + V * kLanes), known), rate);
        read[0][V] = read[1][V] = recalled[0][V] = recalled[1][V] = zero();
    });
    int64_t r = 0;
    for (; r + 2 <= size; r += 2) {
        float* const rows = state + r * kStateColumns;
        change_row<HasNext>(rows, decay, key[r], query[r], HasNext ? next_key[r] : 0.0f, change, read[0], recalled[0]);
        change_row<HasNext>(rows + kStateColumns, decay, key[r + 1], query[r + 1], HasNext ? next_key[r + 1] : 0.0f, change,
                            read[1], recalled[1]);
    }
    if (r < size) {
        change_row<HasNext>(state + r * kStateColumns, decay, key[r], query[r], HasNext ? next_key[r] : 0.0f, change, read[0],
                            recalled[0]);
    }
    unroll<kStateVectors>([&](auto v) MOEC_INLINE_LAMBDA {
        constexpr int V = decltype(v)::value;
        store(call.out + place + V * kLanes, add(read[0][V], read[1][V]));
    });
}

// The gated delta rule for tokens [first, last) of one sequence, in one head and kStateColumns features of its values.
// state: [Dk, kStateColumns], read and written.
inline void delta_rule(const DeltaCall& call, int64_t head, int64_t block, int64_t first, int64_t last, float* state) {
    Floats recalled[2][kStateVectors];
    unroll<kStateVectors>([&](auto v) MOEC_INLINE_LAMBDA {
        recalled[0][decltype(v)::value] = recalled[1][decltype(v)::value] = zero();
    });
    const int64_t key_head = head / (call.value_heads / call.key_heads);
    add_recalled(call.k + (first * call.key_heads + key_head) * call.key_size, state, call.key_size, recalled);
    int64_t token = first;
    for (; token + 1 < last; ++token) {
        delta_step<true>(call, head, block, token, state, recalled);
    }
    delta_step<false>(call, head, block, token, state, recalled);
}
