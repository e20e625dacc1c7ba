// Scores of the experts of a layer from those that a token chose in the two layers before it: the dictionary of activation
// paths. The specification is PathPredictor in runtime/prefetch/predictors.py.

#pragma once

#include <cstdint>
#include <vector>

namespace moec {

// The tables of runtime/bundle/tables.py. E experts, N keys.
struct PathTables {
    const uint32_t* transitions;  // [layers - 1, E, E]
    const int64_t* keys;          // [N], increasing; null in the exact-set form
    const uint16_t* sets;         // [N, 1 + 2 top_k], increasing rows; null in the pair form
    const int64_t* offsets;       // [N + 1]
    const uint16_t* experts;
    const uint32_t* counts;
    int64_t num_keys, num_experts, top_k;
    double least_count;           // keys seen less often are left out
};

// The layers that predict another one: the last that routes, and the one before it or -1.
struct PathSource {
    int64_t last, before;
};

// Scores of the experts of layer `following`, [E]. before, chosen: experts of the token in the two layers of `source`.
// Returns false if nothing is known of them: all scores are 0.
bool path_scores(const PathTables& tables, int64_t following, const PathSource& source, const std::vector<int32_t>& before,
                 const std::vector<int32_t>& chosen, std::vector<double>& scores);

}  // namespace moec
