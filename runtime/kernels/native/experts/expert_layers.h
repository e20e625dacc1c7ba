// The experts of each layer for the tokens of a pass, from the residual stream back to the residual stream, without Python
// between the steps. Start here for decode: `run` routes, requests experts (expert_cache.h), looks ahead
// (prefetch_advice.cpp), computes and adds. Experts that several tokens chose are computed once for all of them.
// The specification is Model._experts_layer in runtime/model/forward.py.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "experts/expert_cache.h"
#include "operations/layer_routing.h"
#include "experts/lossy_choice.h"
#include "operations/operations.h"

namespace moec {

// The dictionary of activation paths: tables of runtime/bundle/tables.py. E experts, N keys.
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

// The best experts of a layer and their scores, likeliest first: top_k + 1 of them, or all if there are fewer.
struct Ranked {
    std::vector<int64_t> experts;
    std::vector<double> scores;
};

// The constants of the specification (RULES in runtime/prefetch/read_ahead_margins.py).
struct ThresholdRules {
    double wrong, right, first, least, most, floor;
};

// Thresholds of the prefetch rule `likely`: the margin from which an expert is read ahead. The margin of an expert is the
// logarithm of its score over that of the first expert that would not be chosen. The specification is
// runtime/prefetch/read_ahead_margins.py.
class LearnedThresholds {
  public:
    using Experts = std::vector<int64_t>;

    explicit LearnedThresholds(const ThresholdRules& rules) : rules_(rules) {}

    double threshold(int64_t running, int64_t layer) const;
    Experts likely(int64_t running, int64_t layer, int64_t rank, const Ranked& ranked, int64_t top_k);
    void observe(int64_t layer, const int32_t* chosen, int64_t count);
    void forget_guesses() { guesses_.clear(); }

  private:
    struct Guess {
        int64_t running;
        double threshold;
        Experts nearest;
    };

    ThresholdRules rules_;
    std::map<std::pair<int64_t, int64_t>, double> thresholds_;  // by running layer and predicted layer
    std::map<int64_t, std::vector<Guess>> guesses_;          // by predicted layer
};

// How many experts of a later layer are read ahead.
// advised: for one token; -1: as many as learned thresholds say. predicted: the most that count as a prediction.
// advised_each: for each of several tokens.
struct AheadCounts {
    int64_t top_k, advised, predicted, advised_each;
};

// A later layer, whose experts are predicted while this one runs.
// rank: 1 for the next layer that routes, 2 for the one after it.
// A router or earlier layers predict its experts. Without both, and if the paths of a token are unknown, `known` does.
// counts: of a pass of its own, of the little model, and of a pass that is computed again; or of the first alone.
struct LayerAhead {
    int64_t rank, layer, first_expert, num_experts;
    std::vector<AheadCounts> counts;
    bool stops_at_miss;   // if one of them has to be read, nothing is advised for later layers
    NormedRouter router;  // no matrix: no router predicts
    PathSource path;      // last -1: no path predicts
    Ranked known;         // all experts of the layer
};

// Limits of a pass that decide what is read ahead for several tokens (specification: runtime/prefetch/advisor.py).
struct PassLimits {
    int64_t most_tokens;      // of a pass
    int64_t choices_for_all;  // choices per expert from which a pass is assumed to need all experts
    int64_t first_decoder;    // layers before it are those of an encoder
};

// The rows of a pass. hidden: [T, D], read and written. sequences: number of sequences that the tokens belong to.
// slots: the sequence of each token, [T]; null if no layer has a capacity.
struct PassRows {
    float* hidden;
    int64_t tokens, sequences;
    const int32_t* slots = nullptr;
};

struct ExpertLayerView {
    const float* norm;       // [D]
    const float* norm_bias;  // [D], of a layer norm; null: an RMS norm
    const float* after_norm;  // [D], of an RMS norm of the sum; may be null
    const float* router_norm;        // [D], before the router; null: it reads what the experts read
    const float* shared_norm;        // [D], before the shared expert; null: it reads what the experts read
    const float* shared_after_norm;  // [D], of its output, and of the sum of the routed experts; both or none
    const float* routed_after_norm;
    float norm_eps;
    const MatrixView* router;  // [E, D]; null: the layer has no routed experts
    const float* router_bias;  // [E]; may be null
    LayerRouting routing;
    const ExpertView* shared;         // computed for every token; may be null
    const MatrixView* shared_router;  // [1, D], the sigmoid of its logit weighs the shared expert; null: its weight is 1
    int64_t layer, first_expert, top_k;
    float residual_scale, stream_scale;
    int64_t capacity;  // tokens of a sequence that an expert computes in a pass; 0: all
    std::vector<const ExpertView*> experts;  // [E]; null: left out of the model, never chosen. Low versions follow, [E] or none
    std::vector<LayerAhead> ahead;           // nearest first; empty: nothing is prefetched
};

class ExpertLayers {
  public:
    using Indices = Residency::Indices;
    enum class End { kDone, kFailed, kTooLarge, kClosed, kInterrupted, kNoMemory };
    // expert: the one that stopped the layer, for kFailed and kTooLarge.
    // dense_ns: time in norm, router and shared expert. experts_ns: in routed experts. shared_ns: in the shared expert alone.
    // demanded: different experts that were chosen. predicted: how many of them had been predicted; -1: there was no prediction.
    struct Outcome {
        End end = End::kDone;
        int64_t expert = -1, dense_ns = 0, experts_ns = 0, shared_ns = 0, demanded = 0, predicted = -1;
    };

    // size: D. ahead_eps: epsilon of the norms before the routers of later layers.
    // paths: what `LayerAhead::path` refers to. lossy: null if no mode decides.
    ExpertLayers(ExpertCache& reads, std::vector<ExpertLayerView> layers, int64_t size, float ahead_eps,
                 const ThresholdRules& rules, const PathTables& paths, const PassLimits& limits, LossyChoice* lossy);

    // hidden += the weighted sums of the layer's experts. `is_interrupted` is called during waits.
    Outcome run(size_t at, const PassRows& rows, const std::function<bool()>& is_interrupted);
    // Forget predictions that will not be compared with a choice, because another pass comes first.
    void forget_guesses() { thresholds_.forget_guesses(); }
    // Call before each pass. is_lossy: whether lossy modes decide in it. Call LossyChoice::begin_pass first.
    void begin_pass(bool is_lossy) {
        has_predicted_ = false;
        choice_ = is_lossy ? lossy_ : nullptr;
        if (is_again()) {
            forget_guesses();  // thresholds learn nothing from it
        }
    }
    // Call after each pass. Memory for several tokens is freed: between passes the expert cache uses it.
    void end_pass();

    const LearnedThresholds& thresholds() const { return thresholds_; }
    size_t count() const { return layers_.size(); }
    int64_t size() const { return size_; }

    // Results of the layer that ran last.
    std::vector<int32_t> chosen;        // [T, K], by the router
    std::vector<float> logits, shares;  // [T, E]; for one token [M, E], softmax of the routers of later layers
    std::vector<double> path_shares;    // [E], or empty if no path is known
    Indices advice;

  private:
    bool route(const ExpertLayerView& layer);
    bool weigh_shared(const ExpertLayerView& layer);
    bool select(const ExpertLayerView& layer);
    void keep_within_capacity(const ExpertLayerView& layer);
    Indices group(const ExpertLayerView& layer);
    void count_predicted(Outcome& outcome);
    End look_ahead(const ExpertLayerView& layer, Outcome& outcome);
    bool look_ahead_of_one(const ExpertLayerView& layer);
    bool look_ahead_of_many(const ExpertLayerView& layer);
    bool look_ahead_again(const ExpertLayerView& layer);
    Ranked predict(const LayerAhead& ahead, const float*& row, int64_t width);
    bool predict_many(const LayerAhead& ahead, int64_t count, Indices& experts, std::vector<float>& least);
    bool add_path_scores(const LayerAhead& ahead, std::vector<double>& total);
    bool foresee(const LayerAhead& ahead, const float* predicted, std::vector<float>& least) const;
    int64_t advised_to_many(const ExpertLayerView& layer, const LayerAhead& ahead) const;
    Indices advised(const ExpertLayerView& layer, const LayerAhead& ahead, const Ranked& best);
    Indices stored_for_one(const LayerAhead& ahead, const Indices& experts, const Ranked& best, bool is_float) const;
    Indices stored_for_many(const LayerAhead& ahead, const Indices& experts, const std::vector<float>& least) const;
    bool take_advice(const LayerAhead& ahead, const Indices& experts, const Indices& stored);
    bool is_held(const Indices& stored);
    bool is_near(const LayerAhead& ahead) const;
    bool compute(const ExpertLayerView& layer, const Indices& found, Outcome& outcome);
    bool compute_one(const ExpertLayerView& layer, const Indices& found);
    bool compute_many(const ExpertLayerView& layer, const Indices& found);
    bool compute_shared(const ExpertLayerView& layer, Outcome& outcome);
    bool compute_hits(const ExpertLayerView& layer, Indices& hits, const Indices& misses, Outcome& outcome);
    End compute_present(const ExpertLayerView& layer, Indices& hits, const Indices& misses, Outcome& outcome);
    End compute_missing(const ExpertLayerView& layer, Indices& remaining, const std::function<bool()>& is_interrupted,
                        Outcome& outcome);
    void add_outputs(const ExpertLayerView& layer);
    void sum_branches(const ExpertLayerView& layer);
    const float* input_of(const float* own_norm, const ExpertLayerView& layer, std::vector<float>& own);
    const float* shared_input(const ExpertLayerView& layer) const {
        return layer.shared_norm == nullptr ? normed_.data() : shared_input_.data();
    }
    int64_t version_of(const ExpertLayerView& layer, int64_t index) const;
    int64_t ranks_of(const ExpertLayerView& layer) const { return top_k_ + (layer.shared != nullptr); }
    bool has_one() const { return rows_.tokens == 1; }
    bool is_again() const { return choice_ != nullptr && choice_->kind() == PassKind::kAgain; }
    const std::vector<int32_t>& versions() const { return has_versions_ ? versions_ : chosen; }
    const AheadCounts& counts_of(const LayerAhead& ahead) const;

    ExpertCache& reads_;
    std::vector<ExpertLayerView> layers_;
    float ahead_eps_;
    int64_t size_;
    LearnedThresholds thresholds_;
    PathTables paths_;
    PassLimits limits_;
    LossyChoice* lossy_;
    LossyChoice* choice_ = nullptr;                // of the pass that runs; null: the router's choice is computed
    PassRows rows_{nullptr, 0, 0};                 // of the layer that runs
    int64_t top_k_ = 0;                            // of the layer and the pass that run
    Indices requested_;                            // stored experts of the layer that runs
    bool has_versions_ = false;
    std::vector<int32_t> versions_;                // [T, K], under lossy modes or a capacity
    std::vector<std::vector<int32_t>> chosen_of_;  // by layer, for the tokens of this pass
    Indices predicted_;  // for the next layer that routes
    bool has_predicted_ = false;
    std::vector<float> normed_, router_input_, shared_input_, weights_, parts_, sum_, shared_weights_;
    // Choices of several tokens, expert by expert: those of expert e are [starts_[e], starts_[e + 1]) of the two others.
    Indices starts_, token_rows_, part_rows_;
};

}  // namespace moec
