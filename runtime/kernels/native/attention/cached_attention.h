// Attention over the cache of keys and values, written once over eight lanes: the kernel `attention` of targets/kernel_table.h.
// This file has no include guard: each targets/kernels_*.cpp includes it inside its own namespace, after
// attention/cached_rows.h and products/rows.h.
//
// - Queries that see the same positions of one head are computed together, so that each row of keys or values is loaded once.
//   Positions at either end that only some of them see are computed for each query alone.
// - Scores are reductions as in products/rows.h. Sums of values run over positions in order. Neither depends on which queries
//   are computed together.
// - Accuracy class: bit-equal across instruction sets, thread counts and batches, for inputs without NaN.

// Scores of Queries queries for Rows positions, beginning with `position`. keys: the row of position 0.
template <int Queries, int Rows, class Element>
MOEC_INLINE void score_rows(const AttentionQuery* queries, const Element* keys, int64_t size, int64_t position, float scale) {
    Floats sum[Queries][Rows];
    const Element* rows = keys + position * size;
    unroll<Queries>([&](auto q) MOEC_INLINE_LAMBDA {
        constexpr int Q = decltype(q)::value;
        unroll<Rows>([&](auto r) MOEC_INLINE_LAMBDA { sum[Q][decltype(r)::value] = zero(); });
    });
    const auto add_products = [&](const auto& load_from) MOEC_INLINE_LAMBDA {
        Floats row[Rows];
        unroll<Rows>([&](auto r) MOEC_INLINE_LAMBDA { row[decltype(r)::value] = load_from(rows + decltype(r)::value * size); });
        unroll<Queries>([&](auto q) MOEC_INLINE_LAMBDA {
            constexpr int Q = decltype(q)::value;
            const Floats value = load_from(queries[Q].q);
            unroll<Rows>([&](auto r) MOEC_INLINE_LAMBDA {
                constexpr int R = decltype(r)::value;
                sum[Q][R] = fma(value, row[R], sum[Q][R]);
            });
        });
    };
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        add_products([&](const auto* p) MOEC_INLINE_LAMBDA { return load_cached(p + i); });
    }
    if (i < size) {
        const int count = lanes_left<kLanes>(size, i);
        add_products([&](const auto* p) MOEC_INLINE_LAMBDA { return load_cached_partial(p + i, count); });
    }
    unroll<Queries>([&](auto q) MOEC_INLINE_LAMBDA {
        constexpr int Q = decltype(q)::value;
        float* scores = queries[Q].scores + position - queries[Q].first;
        unroll<Rows>([&](auto r) MOEC_INLINE_LAMBDA {
            scores[decltype(r)::value] = sum_lanes(sum[Q][decltype(r)::value]) * scale;
        });
    });
}

template <int Queries, class Element>
void score_positions(const AttentionQuery* queries, const Element* keys, int64_t size, int64_t first, int64_t end,
                     float scale) {
    constexpr int kRows = Queries == 1 ? 4 : 2;
    for (; first + kRows <= end; first += kRows) {
        ask_for_cached(keys + first * size + kCachedAhead<Element>, kRows * size);
        score_rows<Queries, kRows>(queries, keys, size, first, scale);
    }
    for (; first < end; ++first) {
        score_rows<Queries, 1>(queries, keys, size, first, scale);
    }
}

// Scores for positions [first, end), which all queries see.
template <class Element>
void score(const AttentionQuery* queries, int count, const Element* keys, int64_t size, int64_t first, int64_t end,
           float scale) {
    static_assert(kMaxAttentionQueries == 4, "one case for each");
    switch (count) {
        case 1:
            return score_positions<1>(queries, keys, size, first, end, scale);
        case 2:
            return score_positions<2>(queries, keys, size, first, end, scale);
        case 3:
            return score_positions<3>(queries, keys, size, first, end, scale);
        default:
            return score_positions<4>(queries, keys, size, first, end, scale);
    }
}

inline void add_row(float* x, const float* other, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const int count = lanes_left<kLanes>(size, i);
        store_partial(x + i, add(load_partial(x + i, count), load_partial(other + i, count)), count);
    }
}

inline void divide_row(float* x, float by, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const int count = lanes_left<kLanes>(size, i);
        store_partial(x + i, div(load_partial(x + i, count), broadcast(by)), count);
    }
}

// The query of one token and head, and the positions that it sees.
inline AttentionQuery query_of(const AttentionCall& call, int64_t token, int64_t head, float* scores) {
    const int64_t position = call.positions[token], place = (token * call.heads + head) * call.head_size;
    const int64_t first = call.window > 0 && position >= call.window ? position - call.window + 1 : 0;
    const int64_t end = call.ends != nullptr ? first + call.ends[token] : position + 1;
    return {call.q + place, scores, call.out + place, first, end};
}

// Add the bias to the scores, if there is one. Then replace each score by exp(score - peak), and return their sum.
inline float share_out(const AttentionCall& call, const AttentionQuery& query, int64_t token, int64_t head) {
    const int64_t count = query.end - query.first, position = call.positions[token];
    if (call.bias != nullptr) {
        add_row(query.scores, call.bias + (head + 1) * (2 * call.context - 1) - call.context + query.first - position, count);
    }
    return exponentiate(query.scores, count, call.sinks == nullptr ? nullptr : call.sinks + head);
}

template <class Element>
void attention_over(const Element* k_cache, const Element* v_cache, const AttentionCall& call, const AttentionPart& part,
                    float* scores, int64_t stride) {
    AttentionQuery queries[kMaxAttentionQueries] = {};
    float totals[kMaxAttentionQueries];
    const int64_t size = call.head_size, kv_head = part.first_head / (call.heads / call.kv_heads);
    const int64_t start = (call.slots[part.first_token] * call.kv_heads + kv_head) * call.context * size;
    const Element *keys = k_cache + start, *values = v_cache + start;
    const int count = static_cast<int>(part.tokens * part.heads);
    const auto token_of = [&](int i) { return part.first_token + i / part.heads; };
    const auto head_of = [&](int i) { return part.first_head + i % part.heads; };
    int64_t first = 0, end = call.context;  // the positions that all queries see
    for (int i = 0; i < count; ++i) {
        queries[i] = query_of(call, token_of(i), head_of(i), scores + i * stride);
        first = queries[i].first > first ? queries[i].first : first;
        end = queries[i].end < end ? queries[i].end : end;
    }
    end = end > first ? end : first;
    score(queries, count, keys, size, first, end, call.scale);
    const int64_t values_size = (end - first) * size;  // their start is prefetched while scores become shares
    ask_for_cached(values + first * size, values_size < kCachedAhead<Element> ? values_size : kCachedAhead<Element>);
    for (int i = 0; i < count; ++i) {
        const AttentionQuery& query = queries[i];
        const int64_t before = first < query.end ? first : query.end;
        score(&query, 1, keys, size, query.first, before, call.scale);
        score(&query, 1, keys, size, end, query.end, call.scale);
        totals[i] = share_out(call, query, token_of(i), head_of(i));
        std::memset(query.out, 0, static_cast<size_t>(size) * sizeof(float));
        weigh_values(&query, 1, values, size, query.first, before);
    }
    weigh_values(queries, count, values, size, first, end);
    for (int i = 0; i < count; ++i) {
        weigh_values(&queries[i], 1, values, size, end, queries[i].end);
        divide_row(queries[i].out, totals[i], size);
    }
}

inline void attention(const AttentionCall& call, const AttentionPart& part, float* scores, int64_t stride) {
    if (call.is_half) {
        const auto *keys = static_cast<const HalfFloat*>(call.k_cache), *values = static_cast<const HalfFloat*>(call.v_cache);
        return attention_over(keys, values, call, part, scores, stride);
    }
    attention_over(static_cast<const float*>(call.k_cache), static_cast<const float*>(call.v_cache), call, part, scores,
                   stride);
}
