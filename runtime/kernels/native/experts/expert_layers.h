// The routed experts of each layer for one token, from the residual stream to the residual stream: what the model does in
// Model._experts_layer (runtime/model/forward.py, the specification), between whose steps no Python runs.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "experts/expert_reads.h"
#include "experts/margins.h"
#include "experts/operations.h"

namespace moec {

// A later layer that is looked at while this one runs.
struct LayerAhead {
    int64_t rank, layer, first_expert, top_k;
    NormedRouter router;  // no matrix: no router can be asked, `known` is always what is likely
    Ranked known;
};

struct ExpertLayerView {
    const float* norm;  // RMS, [D]
    float norm_eps;
    const MatrixView* router;  // [E, D]; null: the layer has no routed experts
    const float* router_bias;  // [E]; may be null
    const ExpertView* shared;  // that every token passes, weighed by 1; may be null
    int64_t layer, first_expert, top_k;
    bool renormalizes;
    float weight_scale, residual_scale;
    std::vector<const ExpertView*> experts;  // [E]
    std::vector<LayerAhead> ahead;           // nearest first; nothing is read ahead where there are none
};

class ExpertLayers {
  public:
    using Indices = Residency::Indices;
    enum class End { kDone, kFailed, kTooLarge, kClosed, kInterrupted, kNoMemory };
    // expert: of kFailed and kTooLarge. dense_ns: norm, router and shared expert. predicted: of the chosen, those that had been;
    // -1: nothing had.
    struct Outcome {
        End end = End::kDone;
        int64_t expert = -1, dense_ns = 0, experts_ns = 0, shared_ns = 0, predicted = -1;
    };

    // size: D. ahead_eps: of the norms in front of all routers that are looked at.
    ExpertLayers(ExpertReads& reads, std::vector<ExpertLayerView> layers, int64_t size, float ahead_eps, const MarginRules& rules);

    // hidden += what the layer's experts make of it, float32 [D]. is_interrupted is asked while it waits.
    Outcome run(size_t at, float* hidden, const std::function<bool()>& is_interrupted);
    // What was predicted will not be compared: another pass comes first.
    void forget_guesses() { margins_.forget_guesses(); }
    // A pass of one token begins.
    void begin_pass() { has_predicted_ = false; }

    const LearnedMargins& margins() const { return margins_; }
    size_t count() const { return layers_.size(); }
    int64_t size() const { return size_; }

    // Of the layer that ran last, until another does.
    std::vector<int32_t> chosen;
    std::vector<float> logits, shares;  // [E]; of the routers that were looked at, [M, E]
    Indices advice;

  private:
    bool route(const ExpertLayerView& layer, const float* hidden);
    bool look_ahead(const ExpertLayerView& layer, const float* hidden);
    bool compute(const ExpertLayerView& layer, const Indices& found, Outcome& outcome);
    bool compute_shared(const ExpertLayerView& layer, Outcome& outcome);
    bool compute_present(const ExpertLayerView& layer, const float* hidden, Indices& hits, bool has_misses, Outcome& outcome);
    End compute_missing(const ExpertLayerView& layer, Indices& remaining, const std::function<bool()>& is_interrupted, Outcome& outcome);
    int64_t rank_of(const ExpertLayerView& layer, int64_t index) const;

    ExpertReads& reads_;
    std::vector<ExpertLayerView> layers_;
    float ahead_eps_;
    int64_t size_;
    LearnedMargins margins_;
    Indices predicted_;  // of the next layer that routes
    bool has_predicted_ = false;
    std::vector<float> normed_, weights_, parts_, sum_;
};

}  // namespace moec
