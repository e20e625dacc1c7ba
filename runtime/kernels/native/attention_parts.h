// How attention is cut into parts, and what one of a part's queries is.

#pragma once

#include <cstdint>

namespace moec {

constexpr int kMaxAttentionQueries = 4;

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
