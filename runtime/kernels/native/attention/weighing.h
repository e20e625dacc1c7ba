// Weighted sums of rows, feature by feature, written once over eight or sixteen lanes: experts' outputs by router weights, and
// values by the shares of attention. This file has no include guard: each targets/kernels_*.cpp includes it inside its own
// namespace, after attention/cached_rows.h.
//
// - Sums over positions and ranks are sequential, no matter which sums are computed together.
// - Accuracy class: bit-equal across instruction sets, thread counts and batches.

// out[d] = sum over ranks, in order, of weights[k] * parts[k, d]. parts: [K, D]; weights: [K]; out: [D].
inline void combine(const float* parts, const float* weights, int64_t top_k, int64_t size, float* out) {
    for (int64_t d = 0; d < size; d += kLanes) {
        const int count = lanes_left<kLanes>(size, d);
        Floats sum = zero();
        for (int64_t rank = 0; rank < top_k; ++rank) {
            sum = fma(broadcast(weights[rank]), load_partial(parts + rank * size + d, count), sum);
        }
        store_partial(out + d, sum, count);
    }
}

// Add share * value to the sums of each query, for Vectors vectors of features beginning with `feature`, over positions
// [first, end) in order. values: the row of position 0.
template <int Queries, int Vectors, class Element>
MOEC_INLINE void weigh_vectors(const AttentionQuery* queries, const Element* values, int64_t size, int64_t first, int64_t end,
                               int64_t feature) {
    Floats sum[Queries][Vectors];
    unroll<Queries>([&](auto q) MOEC_INLINE_LAMBDA {
        constexpr int Q = decltype(q)::value;
        unroll<Vectors>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            sum[Q][V] = load(queries[Q].out + feature + V * kLanes);
        });
    });
    for (int64_t p = first; p < end; ++p) {
        if constexpr (Vectors > 1) {
            ask_for_cached(values + p * size + feature + kCachedAhead<Element>, Vectors * kLanes);
        }
        Floats row[Vectors];
        unroll<Vectors>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            row[V] = load_cached(values + p * size + feature + V * kLanes);
        });
        unroll<Queries>([&](auto q) MOEC_INLINE_LAMBDA {
            constexpr int Q = decltype(q)::value;
            const Floats share = broadcast(queries[Q].scores[p - queries[Q].first]);
            unroll<Vectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                sum[Q][V] = fma(share, row[V], sum[Q][V]);
            });
        });
    }
    unroll<Queries>([&](auto q) MOEC_INLINE_LAMBDA {
        constexpr int Q = decltype(q)::value;
        unroll<Vectors>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            store(queries[Q].out + feature + V * kLanes, sum[Q][V]);
        });
    });
}

// The last features of one query, fewer than a register holds.
template <class Element>
void weigh_last(const AttentionQuery& query, const Element* values, int64_t size, int64_t first, int64_t end, int64_t feature) {
    const int count = static_cast<int>(size - feature);
    Floats sum = load_partial(query.out + feature, count);
    for (int64_t p = first; p < end; ++p) {
        sum = fma(broadcast(query.scores[p - query.first]), load_cached_partial(values + p * size + feature, count), sum);
    }
    store_partial(query.out + feature, sum, count);
}

template <int Queries, class Element>
void weigh_values_of(const AttentionQuery* queries, const Element* values, int64_t size, int64_t first, int64_t end) {
    constexpr int kVectors = Queries == 1 ? 8 : Queries == 2 ? kWeighedSums / 2 : kWeighedSums / 4;
    int64_t feature = 0;
    for (; feature + kVectors * kLanes <= size; feature += kVectors * kLanes) {
        weigh_vectors<Queries, kVectors>(queries, values, size, first, end, feature);
    }
    for (; feature + kLanes <= size; feature += kLanes) {
        weigh_vectors<Queries, 1>(queries, values, size, first, end, feature);
    }
    for (int q = 0; q < Queries && feature < size; ++q) {
        weigh_last(queries[q], values, size, first, end, feature);
    }
}

// Add share * value to the sums of each of `count` queries, over positions [first, end), which all of them see.
template <class Element>
void weigh_values(const AttentionQuery* queries, int count, const Element* values, int64_t size, int64_t first, int64_t end) {
    static_assert(kMaxAttentionQueries == 4, "one case for each");
    switch (count) {
        case 1:
            return weigh_values_of<1>(queries, values, size, first, end);
        case 2:
            return weigh_values_of<2>(queries, values, size, first, end);
        case 3:
            return weigh_values_of<3>(queries, values, size, first, end);
        default:
            return weigh_values_of<4>(queries, values, size, first, end);
    }
}
