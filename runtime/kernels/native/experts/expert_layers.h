// The experts of each layer for one token, from the residual stream back to the residual stream, without Python between the
// steps. Start here for decode: `run` routes, requests experts (expert_cache.h), looks ahead
// (prefetch_advice.cpp), computes and adds.
// The specification is Model._experts_layer in runtime/model/forward.py.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "experts/expert_cache.h"
#include "prefetch/path_scores.h"
#include "prefetch/thresholds.h"
#include "operations/operations.h"

namespace moec {

// A later layer, whose experts are predicted while this one runs.
// rank: 1 for the next layer that routes, 2 for the one after it.
// A router or earlier layers predict its experts. Without both, and if the paths of a token are unknown, `known` does.
// advised: experts to read ahead; -1: as many as learned thresholds say. predicted: the most that count as a prediction.
struct LayerAhead {
    int64_t rank, layer, first_expert, top_k, num_experts, advised, predicted;
    bool stops_at_miss;   // if one of them has to be read, nothing is advised for later layers
    NormedRouter router;  // no matrix: no router predicts
    PathSource path;      // last -1: no path predicts
    Ranked known;
};

struct ExpertLayerView {
    const float* norm;  // RMS, [D]
    float norm_eps;
    const MatrixView* router;  // [E, D]; null: the layer has no routed experts
    const float* router_bias;  // [E]; may be null
    const ExpertView* shared;  // computed for every token with weight 1; may be null
    int64_t layer, first_expert, top_k;
    bool renormalizes;
    float weight_scale, residual_scale;
    std::vector<const ExpertView*> experts;  // [E]; null: left out of the model, never chosen
    bool has_left_out;
    std::vector<LayerAhead> ahead;           // nearest first; empty: nothing is prefetched
};

class ExpertLayers {
  public:
    using Indices = Residency::Indices;
    enum class End { kDone, kFailed, kTooLarge, kClosed, kInterrupted, kNoMemory };
    // expert: the one that stopped the layer, for kFailed and kTooLarge.
    // dense_ns: time in norm, router and shared expert. experts_ns: in routed experts. shared_ns: in the shared expert alone.
    // predicted: how many of the chosen experts had been predicted; -1: there was no prediction.
    struct Outcome {
        End end = End::kDone;
        int64_t expert = -1, dense_ns = 0, experts_ns = 0, shared_ns = 0, predicted = -1;
    };

    // size: D. ahead_eps: epsilon of the norms before the routers of later layers.
    // paths: what `LayerAhead::path` refers to.
    ExpertLayers(ExpertCache& reads, std::vector<ExpertLayerView> layers, int64_t size, float ahead_eps,
                 const ThresholdRules& rules, const PathTables& paths);

    // hidden += the weighted sum of the layer's experts, float32 [D]. `is_interrupted` is called during waits.
    Outcome run(size_t at, float* hidden, const std::function<bool()>& is_interrupted);
    // Forget predictions that will not be compared with a choice, because another pass comes first.
    void forget_guesses() { thresholds_.forget_guesses(); }
    // Call before each pass of one token.
    void begin_pass() { has_predicted_ = false; }

    const LearnedThresholds& thresholds() const { return thresholds_; }
    size_t count() const { return layers_.size(); }
    int64_t size() const { return size_; }

    // Results of the layer that ran last.
    std::vector<int32_t> chosen;
    std::vector<float> logits, shares;  // [E]; [M, E], softmax of the routers of later layers
    std::vector<double> path_shares;    // [E], or empty if no path is known
    Indices advice;

  private:
    bool route(const ExpertLayerView& layer, const float* hidden);
    const float* logits_among_kept(const ExpertLayerView& layer);
    void replace_left_out(const ExpertLayerView& layer, const float* kept);
    bool look_ahead(const ExpertLayerView& layer, const float* hidden);
    Ranked predict(const LayerAhead& ahead, const float*& row, int64_t width);
    Indices advised(const ExpertLayerView& layer, const LayerAhead& ahead, const Ranked& best);
    bool is_held(const LayerAhead& ahead, const Indices& experts);
    bool compute(const ExpertLayerView& layer, const Indices& found, Outcome& outcome);
    bool compute_shared(const ExpertLayerView& layer, Outcome& outcome);
    bool compute_present(const ExpertLayerView& layer, const float* hidden, Indices& hits, bool has_misses, Outcome& outcome);
    End compute_missing(const ExpertLayerView& layer, Indices& remaining, const std::function<bool()>& is_interrupted,
                        Outcome& outcome);
    int64_t rank_of(const ExpertLayerView& layer, int64_t index) const;

    ExpertCache& reads_;
    std::vector<ExpertLayerView> layers_;
    float ahead_eps_;
    int64_t size_;
    LearnedThresholds thresholds_;
    PathTables paths_;
    std::vector<std::vector<int32_t>> chosen_of_;  // by layer, for this token
    Indices predicted_;  // for the next layer that routes
    bool has_predicted_ = false;
    std::vector<float> normed_, weights_, parts_, sum_, kept_;
};

}  // namespace moec
