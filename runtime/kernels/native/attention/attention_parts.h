// The parts into which one attention call is split, and the queries of a part.

#pragma once

#include <cstdint>

namespace moec {

constexpr int kMaxAttentionQueries = 4;

// An element of a cache of half floats.
struct HalfFloat {
    uint16_t bits;
};

// `tokens` consecutive tokens of one sequence times `heads` heads that share keys and values.
// At most kMaxAttentionQueries queries.
struct AttentionPart {
    int64_t first_token, tokens, first_head, heads;
};

// The query of one token and head. It sees positions [first, end).
struct AttentionQuery {
    const float* q;  // [Dh]
    float* scores;   // [end - first]
    float* out;      // [Dh]
    int64_t first, end;
};

}  // namespace moec
