// How attention is cut into parts, and what one of a part's queries is.

#pragma once

#include <cstdint>

namespace moec {

constexpr int kMaxAttentionQueries = 4;

// An element of a cache of keys and values in 16 bits.
struct HalfFloat {
    uint16_t bits;
};

// `tokens` tokens of one sequence in a row times `heads` heads that share their keys and values: at most
// kMaxAttentionQueries queries.
struct AttentionPart {
    int64_t first_token, tokens, first_head, heads;
};

// One token and head. Positions [first, end) are seen.
struct AttentionQuery {
    const float* q;  // [Dh]
    float* scores;   // [end - first]
    float* out;      // [Dh]
    int64_t first, end;
};

}  // namespace moec
