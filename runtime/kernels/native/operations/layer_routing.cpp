// Choices of a router, and weights of other choices.

#include "operations/layer_routing.h"

#include <algorithm>
#include <limits>

namespace moec {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

}  // namespace

const RoutingRule& LayerRouting::any_rule() const {
    static const RoutingRule plain{Scoring::kSoftmax, nullptr, 1, 1, false, 0.0f, false, 1e-20f};
    return rule == nullptr ? plain : *rule;
}

bool LayerRouting::choose(const float* logits, int64_t tokens, int64_t top_k, int32_t* chosen, float* weights) const {
    std::vector<float> kept;
    if (has_left_out) {
        kept = among_kept(logits, tokens);
        logits = kept.data();
    }
    const RouteCall call{logits, chosen, weights, experts, top_k, renormalizes};
    if (rule != nullptr) {
        route_by_rule(*rule, call, tokens, all_left_out());
    } else if (!route(call, tokens)) {
        return false;
    } else {
        for (int64_t t = 0; t < tokens; ++t) {
            replace_left_out(logits + t * experts, top_k, chosen + t * top_k);
        }
    }
    for (int64_t i = 0; scale != 1.0f && i < tokens * top_k; ++i) {
        weights[i] *= scale;
    }
    for (int64_t i = 0; expert_scales != nullptr && i < tokens * top_k; ++i) {
        weights[i] *= expert_scales[chosen[i]];
    }
    return true;
}

// The logits with those of experts that are left out set to -inf.
std::vector<float> LayerRouting::among_kept(const float* logits, int64_t tokens) const {
    std::vector<float> kept(logits, logits + tokens * experts);
    for (size_t i = 0; i < kept.size(); ++i) {
        kept[i] = left_out[i % left_out.size()] != 0 ? kNever : kept[i];
    }
    return kept;
}

// Choose again where an expert that is left out was chosen, because logits of the others are NaN or -inf. The weights, which
// are NaN or 0 then, stay. NaN reaches the logits of the model, where an error names it.
void LayerRouting::replace_left_out(const float* logits, int64_t top_k, int32_t* chosen) const {
    const auto is_left_out = [this](int64_t expert) { return left_out[static_cast<size_t>(expert)] != 0; };
    if (!has_left_out || std::none_of(chosen, chosen + top_k, is_left_out)) {
        return;
    }
    int64_t rank = 0;
    for (const int64_t expert : largest(logits, experts, experts)) {
        if (rank < top_k && !is_left_out(expert)) {
            chosen[rank++] = static_cast<int32_t>(expert);
        }
    }
}

std::vector<float> LayerRouting::scores(const float* logits) const {
    std::vector<float> found(logits, logits + experts);
    if (has_left_out) {
        found = among_kept(logits, 1);
    }
    expert_scores(any_rule(), found.data(), experts);
    return found;
}

std::vector<uint8_t> LayerRouting::allowed(const std::vector<float>& scores) const {
    std::vector<float> ranked = scores;
    rank_experts(any_rule(), ranked.data(), experts, all_left_out());
    std::vector<uint8_t> found(ranked.size());
    std::transform(ranked.begin(), ranked.end(), found.begin(), [](float score) { return score > kNever; });
    return found;
}

void LayerRouting::weigh(const std::vector<float>& scores, const int32_t* chosen, int64_t top_k, float* weights) const {
    for (int64_t rank = 0; rank < top_k; ++rank) {
        weights[rank] = chosen[rank] < 0 ? 0.0f : scores[static_cast<size_t>(chosen[rank])];
    }
    if (renormalizes) {
        const float sum = numpy_sum(weights, top_k) + any_rule().least_sum;
        std::transform(weights, weights + top_k, weights, [sum](float weight) { return weight / sum; });
    }
    for (int64_t rank = 0; rank < top_k; ++rank) {
        weights[rank] *= expert_scales == nullptr ? 1.0f : expert_scales[std::max(chosen[rank], 0)];
        weights[rank] *= scale;
    }
}

void LayerRouting::add_demand(const float* logits, int64_t tokens, std::vector<float>& demand) const {
    std::vector<float> kept(logits, logits + tokens * experts);
    if (has_left_out) {
        kept = among_kept(logits, tokens);
    }
    for (int64_t t = 0; t < tokens; ++t) {
        float* const row = kept.data() + t * experts;
        predicted_scores(any_rule(), row, experts);
        std::transform(demand.begin(), demand.end(), row, demand.begin(), [](float sum, float score) { return sum + score; });
    }
}

}  // namespace moec
