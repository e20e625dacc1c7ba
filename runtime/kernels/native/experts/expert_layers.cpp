// One token through the experts of one layer. `run` is the order of the steps: route, request the experts, look ahead
// (prefetch_advice.cpp), compute the hits, wait for the misses and compute them, add the results to the residual stream.

#include "experts/expert_layers.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "threads/clock.h"

namespace moec {
namespace {

// Leases on the experts of this token. The destructor ends them on every path.
class Leases {
  public:
    explicit Leases(ExpertCache& reads) : reads_(reads) {}
    Leases(const Leases&) = delete;
    Leases& operator=(const Leases&) = delete;
    ~Leases() {
        for (const ExpertCache::Indices* const indices : {&hits, &misses}) {
            if (!indices->empty()) {
                reads_.unlease(*indices);
            }
        }
    }

    ExpertCache::Indices hits, misses;

  private:
    ExpertCache& reads_;
};

}  // namespace

ExpertLayers::ExpertLayers(ExpertCache& reads, std::vector<ExpertLayerView> layers, int64_t size, float ahead_eps,
                           const ThresholdRules& rules, const PathTables& paths)
    : reads_(reads),
      layers_(std::move(layers)),
      ahead_eps_(ahead_eps),
      size_(size),
      thresholds_(rules),
      paths_(paths),
      chosen_of_(layers_.size()) {
    int64_t ranks = 0;
    for (const ExpertLayerView& layer : layers_) {
        ranks = std::max(ranks, layer.top_k + (layer.shared != nullptr));
    }
    for (std::vector<float>* const row : {&normed_, &sum_}) {
        row->resize(static_cast<size_t>(size_));
    }
    parts_.resize(static_cast<size_t>(ranks * size_));
}

bool ExpertLayers::route(const ExpertLayerView& layer, const float* hidden) {
    const KernelTable& kernels = active_kernels();
    kernels.rms_norm(hidden, layer.norm, layer.norm_eps, size_, normed_.data());
    logits.resize(layer.router == nullptr ? 0 : static_cast<size_t>(layer.router->rows));
    chosen.resize(static_cast<size_t>(layer.top_k));
    weights_.resize(static_cast<size_t>(layer.top_k));
    if (layer.router == nullptr) {
        return true;
    }
    float* const rows[] = {logits.data()};
    if (!linears(&layer.router, 1, normed_.data(), 1, rows)) {
        return false;
    }
    add_bias(logits.data(), layer.router_bias, layer.router->rows);
    const float* const kept = logits_among_kept(layer);
    const RouteCall call{kept, chosen.data(), weights_.data(), layer.router->rows, layer.top_k, layer.renormalizes};
    if (!moec::route(call, 1)) {
        return false;
    }
    replace_left_out(layer, kept);
    if (layer.weight_scale != 1.0f) {
        for (float& weight : weights_) {
            weight *= layer.weight_scale;
        }
    }
    return true;
}

// The logits with those of experts that are left out set to -inf. `logits` itself keeps the values of the router.
const float* ExpertLayers::logits_among_kept(const ExpertLayerView& layer) {
    if (!layer.has_left_out) {
        return logits.data();
    }
    kept_ = logits;
    for (size_t e = 0; e < kept_.size(); ++e) {
        if (layer.experts[e] == nullptr) {
            kept_[e] = -std::numeric_limits<float>::infinity();
        }
    }
    return kept_.data();
}

// Choose again where an expert that is left out was chosen, because logits of the others are NaN or -inf. The weights, which
// are NaN or 0 then, stay. NaN reaches the logits of the model, where an error names it.
void ExpertLayers::replace_left_out(const ExpertLayerView& layer, const float* kept) {
    const auto is_left_out = [&layer](int64_t expert) { return layer.experts[static_cast<size_t>(expert)] == nullptr; };
    if (std::none_of(chosen.begin(), chosen.end(), is_left_out)) {
        return;
    }
    size_t rank = 0;
    for (const int64_t expert : largest(kept, layer.router->rows, layer.router->rows)) {
        if (rank < chosen.size() && !is_left_out(expert)) {
            chosen[rank++] = static_cast<int32_t>(expert);
        }
    }
}

int64_t ExpertLayers::rank_of(const ExpertLayerView& layer, int64_t index) const {
    return std::find(chosen.begin(), chosen.end(), static_cast<int32_t>(index - layer.first_expert)) - chosen.begin();
}

bool ExpertLayers::compute(const ExpertLayerView& layer, const Indices& found, Outcome& outcome) {
    const int64_t started_ns = now_ns();
    std::vector<const ExpertView*> experts;
    Indices ranks;
    for (const int64_t index : found) {
        experts.push_back(layer.experts[static_cast<size_t>(index - layer.first_expert)]);
        ranks.push_back(rank_of(layer, index));
    }
    const int64_t count = static_cast<int64_t>(experts.size());
    const bool has_memory = experts_of_token(experts.data(), count, normed_.data(), ranks.data(), parts_.data());
    outcome.experts_ns += now_ns() - started_ns;
    return has_memory;
}

// The shared expert is one more rank, after the routed ones.
bool ExpertLayers::compute_shared(const ExpertLayerView& layer, Outcome& outcome) {
    if (layer.shared == nullptr) {
        return true;
    }
    const int64_t started_ns = now_ns();
    weights_.push_back(1.0f);
    const bool has_memory = experts_of_token(&layer.shared, 1, normed_.data(), &layer.top_k, parts_.data());
    outcome.shared_ns = now_ns() - started_ns;
    outcome.dense_ns += outcome.shared_ns;
    return has_memory;
}

// Compute everything that needs no read, while reads run. If the layer misses, its hits come before looking ahead, because
// prefetch reads would wait for the missing experts anyway. The shared expert comes last, before the first wait.
bool ExpertLayers::compute_present(const ExpertLayerView& layer, const float* hidden, Indices& hits, bool has_misses,
                                   Outcome& outcome) {
    const bool looks_behind_hits = !hits.empty() && has_misses;
    if (!looks_behind_hits && !look_ahead(layer, hidden)) {
        return false;
    }
    if (!hits.empty()) {
        if (!compute(layer, hits, outcome)) {
            return false;
        }
        reads_.unlease(hits);
        hits.clear();
    }
    if (looks_behind_hits && !look_ahead(layer, hidden)) {
        return false;
    }
    return compute_shared(layer, outcome);
}

ExpertLayers::End ExpertLayers::compute_missing(const ExpertLayerView& layer, Indices& remaining,
                                                const std::function<bool()>& is_interrupted, Outcome& outcome) {
    while (!remaining.empty()) {
        Indices found;
        const ExpertCache::Wait state = reads_.wait(remaining, true, found);
        if (state == ExpertCache::Wait::kAgain) {
            if (is_interrupted()) {
                return End::kInterrupted;
            }
            continue;
        }
        if (state != ExpertCache::Wait::kReady) {
            outcome.expert = state == ExpertCache::Wait::kFailed ? found[0] : remaining[0];
            return state == ExpertCache::Wait::kFailed     ? End::kFailed
                   : state == ExpertCache::Wait::kTooLarge ? End::kTooLarge
                                                           : End::kClosed;
        }
        if (!compute(layer, found, outcome)) {
            return End::kNoMemory;
        }
        const auto is_found = [&found](int64_t index) { return std::find(found.begin(), found.end(), index) != found.end(); };
        remaining.erase(std::remove_if(remaining.begin(), remaining.end(), is_found), remaining.end());
        reads_.unlease(found);
    }
    return End::kDone;
}

ExpertLayers::Outcome ExpertLayers::run(size_t at, float* hidden, const std::function<bool()>& is_interrupted) {
    const ExpertLayerView& layer = layers_[at];
    Outcome outcome;
    const auto ended = [&outcome](End end) {
        outcome.end = end;
        return outcome;
    };
    const int64_t started_ns = now_ns();
    advice.clear();
    shares.clear();
    path_shares.clear();
    if (!route(layer, hidden)) {
        return ended(End::kNoMemory);
    }
    outcome.dense_ns = now_ns() - started_ns;
    if (paths_.num_experts > 0) {
        chosen_of_[at] = chosen;
    }
    if (has_predicted_) {
        outcome.predicted = std::count_if(chosen.begin(), chosen.end(), [this](int32_t expert) {
            return std::find(predicted_.begin(), predicted_.end(), expert) != predicted_.end();
        });
    }
    has_predicted_ = false;
    thresholds_.observe(layer.layer, chosen.data(), layer.top_k);

    Leases leases(reads_);
    Indices requested;
    for (const int32_t expert : chosen) {
        requested.push_back(layer.first_expert + expert);
    }
    if (!reads_.request_and_queue(layer.layer, requested, leases.hits, leases.misses)) {  // reads start before the hits compute
        return ended(End::kClosed);
    }
    if (!compute_present(layer, hidden, leases.hits, !leases.misses.empty(), outcome)) {
        return ended(End::kNoMemory);
    }
    const End end = compute_missing(layer, leases.misses, is_interrupted, outcome);
    if (end != End::kDone) {
        return ended(end);
    }
    combine(parts_.data(), weights_.data(), 1, static_cast<int64_t>(weights_.size()), size_, sum_.data());
    for (int64_t i = 0; i < size_; ++i) {
        hidden[i] += sum_[static_cast<size_t>(i)] * layer.residual_scale;
    }
    return outcome;
}

}  // namespace moec
