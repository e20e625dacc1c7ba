// The lossy modes in a pass: a cached expert instead of the router's, a low version of it, or none. The specification is
// PassChoice in runtime/modes/expert_choice.py. T tokens, E experts of a layer, K ranks, N high versions in all.
//
// A version is an expert's number in its layer; E is added for its low version. kNoExpert: the rank is not computed.

#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "operations/layer_routing.h"
#include "experts/logical_cache.h"

namespace moec {

constexpr int32_t kNoExpert = -1;

// What a pass computes: a prompt; tokens with all their experts; with those of the little model; again with all of them,
// because the little model was unsure.
enum class PassKind { kPrompt, kAll, kLittle, kAgain };

// LossyModes in runtime/options/lossy.py.
struct LossyRules {
    bool has_precision, has_routing, has_little;
    double low_above, skip_above, margin, drop;
    int64_t little_experts;  // 0: half of each layer's
};

// The fields of runtime/modes/mode_counts.py that passes count, in the same order.
struct LossyCounts {
    int64_t ranks, missed, replaced, dropped, low, skipped, foretold, foretold_right, prompt_experts, prompt_missed, prompt_low,
        prompt_skipped, routings;
    double lower_half;
};

// The router's choice for the tokens of a pass in one layer. first_expert: stored index of the layer's first expert.
struct Routed {
    int64_t layer, first_expert, tokens, top_k;
    const LayerRouting* routing;
    const float* logits;  // [T, E]
};

class LossyChoice {
  public:
    using Indices = Residency::Indices;

    // cache: null if no mode reads it. low: stored index of each expert's low version, [N], or -1.
    LossyChoice(const LossyRules& rules, LogicalCache* cache, std::vector<int64_t> low);

    // foretold: by layer, the logits [T, E] of the pass that is computed again; else empty.
    void begin_pass(PassKind kind, std::map<int64_t, std::vector<float>> foretold);
    PassKind kind() const { return kind_; }
    int64_t top_k(int64_t own) const;
    // Logits of a later layer that the discarded pass had; null if there are none.
    const float* foretold(int64_t layer) const;
    bool reads_unimportance() const { return rules_.has_precision; }
    bool has_little() const { return rules_.has_little; }
    int64_t high_count() const { return static_cast<int64_t>(low_.size()); }
    // Stored index of the low version of a stored expert, or -1.
    int64_t low_index(int64_t high) const { return low_[static_cast<size_t>(high)]; }

    // Changes the router's choice to versions, and the weights to those of these experts. Both [T, K].
    // Returns false without memory.
    bool select(const Routed& routed, std::vector<int32_t>& versions, std::vector<float>& weights);
    // Report the stored experts that a layer requests, and those read ahead. Returns one that does not fit, or -1.
    int64_t requested(int64_t layer, const Indices& experts, const Indices& ahead);
    int64_t stored(int64_t first_expert, int64_t experts, int64_t version) const;
    int64_t version_of(int64_t first_expert, int64_t experts, int64_t stored) const;
    // The cache by which the modes decide; null if none reads it.
    const LogicalCache* cache() const { return cache_; }

    // Stored versions that predicted experts of a layer need, likeliest first. scores: of the experts.
    // total: sum of the scores of a token's experts.
    Indices advised(int64_t first_expert, int64_t count, const Indices& experts, const std::vector<double>& scores,
                    double total) const;
    // The same for several tokens. least: as `least_unimportance` gives it; empty if it was not foreseen.
    Indices advised_to_many(int64_t first_expert, int64_t count, const Indices& experts, const std::vector<float>& least) const;

    LossyCounts counts{};

  private:
    bool holds(int64_t first_expert, int64_t count, int64_t version) const;
    int64_t low_of(int64_t first_expert, int64_t count, int64_t expert) const;
    bool is_cached(const Routed& routed, double unimportance, int64_t expert) const;
    int64_t version(int64_t first_expert, int64_t count, int64_t expert, double unimportance) const;
    void count_choice(const Routed& routed, const std::vector<int32_t>& chosen, const std::vector<float>& weights);
    bool count_foretold(const Routed& routed, const std::vector<int32_t>& chosen);
    void take_cached(const Routed& routed, std::vector<int32_t>& chosen, std::vector<float>& weights);
    // Experts that a token may choose, best first, and their scores, [E].
    struct Candidates {
        std::vector<float> scores;
        Indices best;
    };
    Candidates candidates(const Routed& routed, int64_t token) const;
    int64_t in_place_of(const Routed& routed, double unimportance, const Candidates& near, const int32_t* row, int64_t rank,
                        float share);
    int64_t best_cached(const Routed& routed, double unimportance, const Candidates& near, const int32_t* row,
                        float least) const;
    void take_versions(const Routed& routed, std::vector<int32_t>& chosen, std::vector<float>& weights);

    LossyRules rules_;
    LogicalCache* cache_;
    std::vector<int64_t> low_, high_;  // high_: of each low version, counted from N on
    PassKind kind_ = PassKind::kPrompt;
    std::map<int64_t, std::vector<float>> foretold_;
};

// The unimportance that each expert has for its most important token, [E]: the share of the weight that the token's better
// experts have. kNotChosen: no token chose it. chosen, weights: [T, K].
constexpr float kNotChosen = 2.0f;
std::vector<float> least_unimportance(const int32_t* chosen, const float* weights, int64_t tokens, int64_t top_k, int64_t experts);

}  // namespace moec
