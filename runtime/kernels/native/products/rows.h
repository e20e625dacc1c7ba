// Operations on rows of floats, written once over eight lanes: norms, rotation, softmax, routing and the gated products of an
// expert. This file has no include guard: each targets/kernels_*.cpp includes it inside its own namespace, after
// attention/weighing.h.
//
// - Reductions: lane i sums elements i, i + 8, ... in order by fma. Then lanes are added as ((0+4)+(2+6)) + ((1+5)+(3+7)).
//   A last part of fewer than eight elements is filled with zeros.
// - exp: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial of degree 7 in r, then two exact scalings by powers of two. The
//   second may round, into subnormals. Relative error <= 2e-7 for normal results; -inf gives 0, +inf gives inf, NaN stays NaN.
// - Bound of a reduction: (n / 8 + 4) 2^-24 sum |a_i b_i| to first order.
// - Accuracy class: bit-equal across instruction sets, thread counts and batches, for inputs without NaN.

MOEC_INLINE Floats exp_lanes(Floats x) {
    const Floats low = broadcast(-104.0f), high = broadcast(89.0f);  // beyond: exactly 0 and inf
    x = smaller(high, larger(low, x));                                // NaN stays NaN: the second operand wins
    const Floats magic = broadcast(12582912.0f);                      // 1.5 * 2^23: the low bits of the sum are the integer
    const Floats shifted = fma(x, broadcast(1.44269504088896341f), magic);
    const Floats n = sub(shifted, magic);
    Floats r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Floats p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), broadcast(1.0f));
    const Ints exponent = sub_int(bits_of(shifted), bits_of(magic));
    const Ints half = shift_right_signed<1>(exponent), rest = sub_int(exponent, half), bias = broadcast_int(127);
    p = mul(p, float_of(shift_left<23>(add_int(half, bias))));
    return mul(p, float_of(shift_left<23>(add_int(rest, bias))));
}

MOEC_INLINE Floats silu_lanes(Floats x) {
    return div(x, add(broadcast(1.0f), exp_lanes(sub(zero(), x))));
}

// x (1 + tanh(z)) / 2 = x / (1 + exp(-2 z)) with z = sqrt(2 / pi) (x + 0.044715 x^3).
MOEC_INLINE Floats gelu_lanes(Floats x) {
    const Floats cubic = fma(mul(x, x), broadcast(-2 * 0.79788456f * 0.044715f), broadcast(-2 * 0.79788456f));
    return div(x, add(broadcast(1.0f), exp_lanes(mul(x, cubic))));
}

inline void exp_row(const float* x, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const int count = lanes_left<kLanes>(size, i);
        store_partial(out + i, exp_lanes(load_partial(x + i, count)), count);
    }
}

inline void silu_row(const float* x, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const int count = lanes_left<kLanes>(size, i);
        store_partial(out + i, silu_lanes(load_partial(x + i, count)), count);
    }
}

// clamped_swiglu: g = min(gate, limit), u = up within +-limit, (u + 1) g / (1 + exp(-1.702 g)).
MOEC_INLINE Floats gated_lanes(Floats gate, Floats up, const Gating& gating) {
    if (gating.activation == Activation::kSilu) {
        return mul(silu_lanes(gate), up);
    }
    if (gating.activation == Activation::kRelu) {
        return larger(zero(), up);  // NaN stays NaN: the second operand wins
    }
    if (gating.activation == Activation::kGelu) {
        return mul(gelu_lanes(gate), up);
    }
    const Floats limit = broadcast(gating.limit), one = broadcast(1.0f);
    const Floats g = smaller(limit, gate), u = smaller(limit, larger(sub(zero(), limit), up));
    return mul(add(u, one), div(g, add(one, exp_lanes(mul(broadcast(-1.702f), g)))));
}

// The gated products of the first `rows` <= 16 lanes of a row block whose first row is `first`. out may be gate.
inline void store_hidden(float* out, const float* gate, const float* up, int64_t rows, const Gating& gating, int64_t first) {
    for (int64_t row = 0; row < rows; row += kLanes) {
        const int count = lanes_left<kLanes>(rows, row);
        Floats g = load_partial(gate + row, count), u = load(up + row);
        if (gating.gate_bias != nullptr) {
            g = add(g, load_partial(gating.gate_bias + first + row, count));
        }
        if (gating.up_bias != nullptr) {
            u = add(u, load_partial(gating.up_bias + first + row, count));
        }
        store_partial(out + row, gated_lanes(g, u, gating), count);
    }
}

inline void expert_hidden(const MatrixView& gate, const MatrixView& up, const Gating& gating, const Activations& x,
                          int64_t tokens, OutputRows out, int64_t begin, int64_t end) {
    const bool has_gate = gating.activation != Activation::kRelu;
    const Product gate_product(gate, x), up_product(up, x);
    alignas(64) float gate_acc[kPanelBlocks * kChunkTokens * kRowsPerBlock];
    alignas(64) float up_acc[kPanelBlocks * kChunkTokens * kRowsPerBlock];
    if (tokens == 1) {  // one matrix after the other, so that each is a single stream of memory
        float* row = row_of(out, 0);
        if (has_gate) {
            multiply_one(gate_product, begin, end, [&](int64_t block, const float* acc) {
                store_rows(row + block * kRowsPerBlock, acc, rows_in_block(up, block));
            });
        }
        multiply_one(up_product, begin, end, [&](int64_t block, const float* acc) {
            float* place = row + block * kRowsPerBlock;
            store_hidden(place, has_gate ? place : acc, acc, rows_in_block(up, block), gating, block * kRowsPerBlock);
        });
        return;
    }
    for (int64_t first = 0; first < tokens; first += kChunkTokens) {
        const int count = static_cast<int>(tokens - first < kChunkTokens ? tokens - first : kChunkTokens);
        const PanelSession session(count);
        for (int64_t block = begin; block < end; block += blocks_in_panels(block, end)) {
            const int blocks = blocks_in_panels(block, end);
            if (has_gate) {
                gate_product.multiply_chunk(block, blocks, first, count, gate_acc);
            }
            up_product.multiply_chunk(block, blocks, first, count, up_acc);
            for (int i = 0; i < blocks * count; ++i) {
                const int64_t place = block + i / count;
                store_hidden(row_of(out, first + i % count) + place * kRowsPerBlock,
                             (has_gate ? gate_acc : up_acc) + i * kRowsPerBlock, up_acc + i * kRowsPerBlock,
                             rows_in_block(up, place), gating, place * kRowsPerBlock);
            }
        }
    }
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
    Floats squares = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const Floats value = load_partial(x + i, lanes_left<kLanes>(size, i));
        squares = fma(value, value, squares);
    }
    const float inverse = 1.0f / square_root(sum_lanes(squares) / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; i += kLanes) {
        const int count = lanes_left<kLanes>(size, i);
        const Floats scaled = mul(load_partial(x + i, count), broadcast(inverse));
        store_partial(out + i, mul(load_partial(weight + i, count), scaled), count);
    }
}

// Two passes: the mean, then the mean square of x - mean. In a single pass, squares of values far from zero would lose their
// differences. x - mean is stored in `out`; missing lanes count as zeros.
inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t size, float* out) {
    Floats sum = zero(), squares = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        sum = add(sum, load_partial(x + i, lanes_left<kLanes>(size, i)));
    }
    const Floats mean = broadcast(sum_lanes(sum) / static_cast<float>(size));
    for (int64_t i = 0; i < size; i += kLanes) {
        const int count = lanes_left<kLanes>(size, i);
        store_partial(out + i, sub(load_partial(x + i, count), mean), count);
        const Floats centred = load_partial(out + i, count);
        squares = fma(centred, centred, squares);
    }
    const Floats inverse = broadcast(1.0f / square_root(sum_lanes(squares) / static_cast<float>(size) + eps));
    for (int64_t i = 0; i < size; i += kLanes) {
        const int count = lanes_left<kLanes>(size, i);
        const Floats scaled = mul(load_partial(out + i, count), inverse);
        store_partial(out + i, fma(load_partial(weight + i, count), scaled, load_partial(bias + i, count)), count);
    }
}

// first' = first cos - second sin; second' = second cos + first sin; one rounded product and one fma each.
inline void rope(const RopeCall& call, int64_t token) {
    const float* cos = call.cos + call.positions[token] * call.half;
    const float* sin = call.sin + call.positions[token] * call.half;
    for (int64_t head = 0; head < call.heads; ++head) {
        float* first = call.x + (token * call.heads + head) * call.head_size;
        float* second = first + call.half;
        for (int64_t i = 0; i < call.half; i += kLanes) {
            const int count = lanes_left<kLanes>(call.half, i);
            const Floats a = load_partial(first + i, count), b = load_partial(second + i, count);
            const Floats c = load_partial(cos + i, count), s = load_partial(sin + i, count);
            store_partial(first + i, fma(sub(zero(), b), s, mul(a, c)), count);
            store_partial(second + i, fma(a, s, mul(b, c)), count);
        }
    }
}

// NaN if x[0] is NaN, else the largest number.
inline float largest(const float* x, int64_t size) {
    Floats best = broadcast(x[0]);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        best = larger(load(x + i), best);
    }
    float most = max_lanes(best);
    for (; i < size; ++i) {
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

// x becomes exp(x - peak), where peak is the largest of x and of `extra`, if given. Returns the sum, including extra's.
inline float exponentiate(float* x, int64_t size, const float* extra = nullptr) {
    const float most = largest(x, size);
    const Floats peak = broadcast(extra != nullptr && *extra > most ? *extra : most);
    Floats sum = zero();
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Floats value = exp_lanes(sub(load(x + i), peak));
        store(x + i, value);
        sum = add(sum, value);
    }
    if (i < size) {
        const int count = lanes_left<kLanes>(size, i);
        store_partial(x + i, exp_lanes(sub(load_partial(x + i, count), peak)), count);
        sum = add(sum, load_partial(x + i, count));
    }
    const float total = sum_lanes(sum);
    return extra == nullptr ? total : total + first_lane(exp_lanes(sub(broadcast(*extra), peak)));
}

// A total order: larger first, NaN last, then the lower index.
inline bool ranks_before(const float* logits, int64_t a, int64_t b) {
    const bool is_nan_a = logits[a] != logits[a], is_nan_b = logits[b] != logits[b];
    if (is_nan_a || is_nan_b) {
        return is_nan_a == is_nan_b ? a < b : is_nan_b;
    }
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

inline void route(const RouteCall& call, int64_t token, float* shares) {
    const float* logits = call.logits + token * call.expert_count;
    int32_t* experts = call.experts + token * call.top_k;
    float* weights = call.weights + token * call.top_k;
    for (int64_t e = 0; e < call.expert_count; ++e) {
        shares[e] = logits[e];
    }
    const float total = exponentiate(shares, call.expert_count);
    int64_t found = 0;
    for (int64_t e = 0; e < call.expert_count; ++e) {  // insert into the best experts so far
        if (found == call.top_k && !ranks_before(logits, e, experts[found - 1])) {
            continue;
        }
        int64_t rank = found < call.top_k ? found++ : found - 1;
        for (; rank > 0 && ranks_before(logits, e, experts[rank - 1]); --rank) {
            experts[rank] = experts[rank - 1];
        }
        experts[rank] = static_cast<int32_t>(e);
    }
    float kept = 0.0f;
    for (int64_t rank = 0; rank < call.top_k; ++rank) {
        weights[rank] = shares[experts[rank]] / total;
        kept += weights[rank];
    }
    for (int64_t rank = 0; call.renormalizes && rank < call.top_k; ++rank) {
        weights[rank] /= kept;
    }
}
