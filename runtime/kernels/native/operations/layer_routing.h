// What a layer's router does after its product: logits to experts and weights, and weights for another choice than its own.
// The specification is RoutingRule in runtime/layers/routing.py. E experts, T tokens, K experts of a token.

#pragma once

#include <cstdint>
#include <vector>

#include "operations/operations.h"

namespace moec {

struct LayerRouting {
    const RoutingRule* rule;  // null: softmax over the experts that are not left out
    int64_t experts;
    bool renormalizes;
    float scale;
    const float* expert_scales;  // [E], factors of the weights; may be null
    std::vector<uint8_t> left_out;  // [E]; 1 for an expert that is left out of the model
    bool has_left_out;

    // logits: [T, E]. chosen, weights: [T, K]. Returns false without memory.
    bool choose(const float* logits, int64_t tokens, int64_t top_k, int32_t* chosen, float* weights) const;
    // The score of each expert, from which its weight is computed: logits of one token, [E], to [E].
    std::vector<float> scores(const float* logits) const;
    // 1 for each expert that a token with these scores may choose, by its best groups.
    std::vector<uint8_t> allowed(const std::vector<float>& scores) const;
    // The weights that the router would give to another choice of a token; negative: no expert, whose weight is 0.
    void weigh(const std::vector<float>& scores, const int32_t* chosen, int64_t top_k, float* weights) const;
    bool can_weigh() const { return rule == nullptr || rule->scoring != Scoring::kSparsemixer; }
    // Adds the scores of each token that rank predictions. logits: [T, E]. demand: [E].
    void add_demand(const float* logits, int64_t tokens, std::vector<float>& demand) const;

  private:
    const RoutingRule& any_rule() const;
    const uint8_t* all_left_out() const { return has_left_out ? left_out.data() : nullptr; }
    std::vector<float> among_kept(const float* logits, int64_t tokens) const;
    void replace_left_out(const float* logits, int64_t top_k, int32_t* chosen) const;
};

}  // namespace moec
