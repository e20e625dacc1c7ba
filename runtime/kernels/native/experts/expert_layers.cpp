// The tokens of a pass through the experts of one layer. `run` is the order of the steps: route, request the experts, look ahead
// (prefetch_advice.cpp), compute the hits, wait for the misses and compute them, add the results to the residual stream.

#include "experts/expert_layers.h"

#include <algorithm>
#include <utility>

namespace moec {
namespace {

constexpr size_t kHitsAtOnce = 4;

// Leases on the experts of this layer. The destructor ends them on every path.
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
                           const ThresholdRules& rules, const PathTables& paths, const PassLimits& limits, LossyChoice* lossy)
    : reads_(reads),
      layers_(std::move(layers)),
      ahead_eps_(ahead_eps),
      size_(size),
      thresholds_(rules),
      paths_(paths),
      limits_(limits),
      lossy_(lossy),
      chosen_of_(layers_.size()) {}

void ExpertLayers::end_pass() {
    if (has_one()) {
        return;
    }
    for (std::vector<float>* const values :
         {&normed_, &router_input_, &shared_input_, &weights_, &parts_, &sum_, &shared_weights_, &logits}) {
        std::vector<float>().swap(*values);
    }
    for (Indices* const places : {&starts_, &token_rows_, &part_rows_}) {
        Indices().swap(*places);
    }
}

bool ExpertLayers::route(const ExpertLayerView& layer) {
    const size_t tokens = static_cast<size_t>(rows_.tokens), experts = static_cast<size_t>(layer.routing.experts);
    const size_t top_k = static_cast<size_t>(top_k_), size = static_cast<size_t>(size_);
    normed_.resize(tokens * size);
    if (layer.norm_bias == nullptr) {
        rms_norm(rows_.hidden, layer.norm, layer.norm_eps, rows_.tokens, size_, normed_.data());
    } else {
        layer_norm(rows_.hidden, layer.norm, layer.norm_bias, layer.norm_eps, rows_.tokens, size_, normed_.data());
    }
    logits.resize(tokens * experts);
    chosen.resize(tokens * top_k);
    weights_.resize(tokens * top_k);
    input_of(layer.shared_norm, layer, shared_input_);
    if (!weigh_shared(layer)) {
        return false;
    }
    if (layer.router == nullptr) {
        return true;
    }
    float* const outputs[] = {logits.data()};
    if (!linears(&layer.router, 1, input_of(layer.router_norm, layer, router_input_), rows_.tokens, outputs)) {
        return false;
    }
    for (size_t t = 0; t < tokens; ++t) {
        add_bias(logits.data() + t * experts, layer.router_bias, layer.router->rows);
    }
    return layer.routing.choose(logits.data(), rows_.tokens, top_k_, chosen.data(), weights_.data());
}

// Lets lossy modes, or the capacity of experts, change what the router chose. Returns false without memory.
bool ExpertLayers::select(const ExpertLayerView& layer) {
    has_versions_ = choice_ != nullptr || layer.capacity > 0;
    if (!has_versions_) {
        return true;
    }
    versions_ = chosen;
    if (choice_ != nullptr && layer.router != nullptr) {
        const Routed routed{layer.layer, layer.first_expert, rows_.tokens, top_k_, &layer.routing, logits.data()};
        if (!choice_->select(routed, versions_, weights_)) {
            return false;
        }
    }
    if (layer.capacity > 0) {
        keep_within_capacity(layer);
    }
    if (contains(versions_, kNoExpert)) {
        std::fill(parts_.begin(), parts_.end(), 0.0f);  // a rank without an expert is added as well
    }
    return true;
}

// Drops each choice that is not among the first ones of its expert in its sequence. Specification: within_capacity in
// runtime/layers/routing.py.
void ExpertLayers::keep_within_capacity(const ExpertLayerView& layer) {
    std::map<std::pair<int32_t, int32_t>, int64_t> taken;  // by slot and expert
    for (size_t at = 0; at < versions_.size(); ++at) {
        int32_t& version = versions_[at];
        if (version != kNoExpert && ++taken[{rows_.slots[static_cast<int64_t>(at) / top_k_], version}] > layer.capacity) {
            version = kNoExpert;
        }
    }
}

// What a part of the layer reads: the stream after a norm of its own, if it has one, else what the experts read.
const float* ExpertLayers::input_of(const float* own_norm, const ExpertLayerView& layer, std::vector<float>& own) {
    if (own_norm == nullptr) {
        return normed_.data();
    }
    own.resize(normed_.size());
    rms_norm(rows_.hidden, own_norm, layer.norm_eps, rows_.tokens, size_, own.data());
    return own.data();
}

// The weight of the shared expert for each token.
bool ExpertLayers::weigh_shared(const ExpertLayerView& layer) {
    shared_weights_.assign(layer.shared == nullptr ? 0 : static_cast<size_t>(rows_.tokens), 1.0f);
    if (layer.shared == nullptr || layer.shared_router == nullptr) {
        return true;
    }
    float* const outputs[] = {shared_weights_.data()};
    if (!linears(&layer.shared_router, 1, shared_input(layer), rows_.tokens, outputs)) {
        return false;
    }
    sigmoid(shared_weights_.data(), rows_.tokens);
    return true;
}

// Groups the choices by expert. Returns the stored experts that are needed: of one token by rank, else by number.
ExpertLayers::Indices ExpertLayers::group(const ExpertLayerView& layer) {
    Indices requested;
    const std::vector<int32_t>& found = versions();
    const auto stored = [&](int64_t version) {
        return choice_ == nullptr ? layer.first_expert + version
                                  : choice_->stored(layer.first_expert, layer.routing.experts, version);
    };
    if (has_one()) {
        for (const int32_t version : found) {
            if (version != kNoExpert) {
                requested.push_back(stored(version));
            }
        }
        return requested;
    }
    starts_.assign(layer.experts.size() + 1, 0);
    token_rows_.resize(found.size());
    part_rows_.resize(found.size());
    for (const int32_t version : found) {
        starts_[static_cast<size_t>(version) + 1] += version != kNoExpert;
    }
    for (size_t v = 0; v < layer.experts.size(); ++v) {
        if (starts_[v + 1] > 0) {
            requested.push_back(stored(static_cast<int64_t>(v)));
        }
        starts_[v + 1] += starts_[v];
    }
    Indices next(starts_.begin(), starts_.end() - 1);
    const int64_t ranks = ranks_of(layer);
    for (int64_t place = 0; place < static_cast<int64_t>(found.size()); ++place) {
        if (found[static_cast<size_t>(place)] == kNoExpert) {
            continue;
        }
        const int64_t at = next[static_cast<size_t>(found[static_cast<size_t>(place)])]++;
        token_rows_[static_cast<size_t>(at)] = place / top_k_;
        part_rows_[static_cast<size_t>(at)] = place / top_k_ * ranks + place % top_k_;
    }
    return requested;
}

// Compares the router's choice with the prediction of the layer before.
void ExpertLayers::count_predicted(Outcome& outcome) {
    Indices different(chosen.begin(), chosen.end());
    if (!has_one()) {
        std::sort(different.begin(), different.end());
        different.erase(std::unique(different.begin(), different.end()), different.end());
    }
    outcome.demanded = static_cast<int64_t>(different.size());
    if (has_predicted_) {
        outcome.predicted = std::count_if(different.begin(), different.end(), [&](int64_t expert) {
            return std::find(predicted_.begin(), predicted_.end(), expert) != predicted_.end();
        });
    }
    has_predicted_ = false;
}

// The place of a stored expert in `experts`.
int64_t ExpertLayers::version_of(const ExpertLayerView& layer, int64_t index) const {
    return choice_ == nullptr ? index - layer.first_expert
                              : choice_->version_of(layer.first_expert, layer.routing.experts, index);
}

bool ExpertLayers::compute(const ExpertLayerView& layer, const Indices& found, Outcome& outcome) {
    const int64_t started_ns = now_ns();
    const bool has_memory = has_one() ? compute_one(layer, found) : compute_many(layer, found);
    outcome.experts_ns += now_ns() - started_ns;
    return has_memory;
}

bool ExpertLayers::compute_one(const ExpertLayerView& layer, const Indices& found) {
    std::vector<const ExpertView*> experts;
    Indices ranks;
    const std::vector<int32_t>& computed = versions();
    for (const int64_t index : found) {
        const int64_t version = version_of(layer, index);
        experts.push_back(layer.experts[static_cast<size_t>(version)]);
        ranks.push_back(std::find(computed.begin(), computed.end(), static_cast<int32_t>(version)) - computed.begin());
    }
    const int64_t count = static_cast<int64_t>(experts.size());
    return experts_of_token(experts.data(), count, normed_.data(), ranks.data(), parts_.data());
}

bool ExpertLayers::compute_many(const ExpertLayerView& layer, const Indices& found) {
    std::vector<const ExpertView*> experts;
    std::vector<ExpertCall> calls;
    for (const int64_t index : found) {
        const size_t expert = static_cast<size_t>(version_of(layer, index)), first = static_cast<size_t>(starts_[expert]);
        experts.push_back(layer.experts[expert]);
        calls.push_back({normed_.data(), token_rows_.data() + first, part_rows_.data() + first,
                         starts_[expert + 1] - starts_[expert], parts_.data()});
    }
    return experts_ffn(experts.data(), calls.data(), static_cast<int64_t>(experts.size()));
}

// The shared expert is one more rank, after the routed ones.
bool ExpertLayers::compute_shared(const ExpertLayerView& layer, Outcome& outcome) {
    if (layer.shared == nullptr) {
        return true;
    }
    const int64_t started_ns = now_ns(), ranks = ranks_of(layer);
    Indices token_rows, part_rows;
    for (int64_t t = 0; t < rows_.tokens; ++t) {
        token_rows.push_back(t);
        part_rows.push_back(t * ranks + top_k_);
    }
    const float* const input = shared_input(layer);
    const ExpertCall call{input, token_rows.data(), part_rows.data(), rows_.tokens, parts_.data()};
    const bool has_memory = has_one()
                                ? experts_of_token(&layer.shared, 1, input, part_rows.data(), parts_.data())
                                : expert_ffn(*layer.shared, call);
    outcome.shared_ns = now_ns() - started_ns;
    outcome.dense_ns += outcome.shared_ns;
    return has_memory;
}

// Computes the hits. Those of several tokens take a while, so the readers get more work meanwhile.
bool ExpertLayers::compute_hits(const ExpertLayerView& layer, Indices& hits, const Indices& misses, Outcome& outcome) {
    const size_t at_once = has_one() || misses.empty() ? hits.size() : kHitsAtOnce;
    while (!hits.empty()) {
        const auto end = hits.begin() + static_cast<int64_t>(std::min(at_once, hits.size()));
        const Indices some(hits.begin(), end);
        if (!compute(layer, some, outcome)) {
            return false;
        }
        hits.erase(hits.begin(), end);
        reads_.unlease(some);
        if (!hits.empty()) {
            reads_.queue_more(misses);
        }
    }
    return true;
}

// Compute everything that needs no read, while reads run. If the layer misses, its hits come before looking ahead, because
// prefetch reads would wait for the missing experts anyway. The shared expert comes last, before the first wait.
ExpertLayers::End ExpertLayers::compute_present(const ExpertLayerView& layer, Indices& hits, const Indices& misses,
                                                Outcome& outcome) {
    const bool looks_behind_hits = !hits.empty() && !misses.empty();
    End end = looks_behind_hits ? End::kDone : look_ahead(layer, outcome);
    if (end == End::kDone && !compute_hits(layer, hits, misses, outcome)) {
        end = End::kNoMemory;
    }
    if (end == End::kDone && looks_behind_hits) {
        end = look_ahead(layer, outcome);
    }
    return end == End::kDone && !compute_shared(layer, outcome) ? End::kNoMemory : end;
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

// Adds the outputs of the experts in the order of their ranks.
void ExpertLayers::add_outputs(const ExpertLayerView& layer) {
    if (layer.shared != nullptr) {
        std::vector<float> all;
        for (int64_t t = 0; t < rows_.tokens; ++t) {
            const float* const own = weights_.data() + t * top_k_;
            all.insert(all.end(), own, own + top_k_);
            all.push_back(shared_weights_[static_cast<size_t>(t)]);
        }
        weights_.swap(all);
    }
    sum_.resize(static_cast<size_t>(rows_.tokens * size_));
    if (layer.routed_after_norm == nullptr) {
        combine(parts_.data(), weights_.data(), rows_.tokens, ranks_of(layer), size_, sum_.data());
    } else {
        sum_branches(layer);
    }
    if (layer.after_norm != nullptr) {
        rms_norm(sum_.data(), layer.after_norm, layer.norm_eps, rows_.tokens, size_, sum_.data());
    }
    for (size_t i = 0; i < sum_.size(); ++i) {
        rows_.hidden[i] += sum_[i] * layer.residual_scale;
    }
    for (size_t i = 0; layer.stream_scale != 1.0f && i < sum_.size(); ++i) {
        rows_.hidden[i] *= layer.stream_scale;
    }
}

// The sum of the routed experts and the output of the shared one, which is the last rank, each after a norm of its own.
void ExpertLayers::sum_branches(const ExpertLayerView& layer) {
    const int64_t ranks = ranks_of(layer);
    for (int64_t t = 0; t < rows_.tokens; ++t) {
        weights_[static_cast<size_t>(t * ranks + top_k_)] = 0.0f;
    }
    combine(parts_.data(), weights_.data(), rows_.tokens, ranks, size_, sum_.data());
    rms_norm(sum_.data(), layer.routed_after_norm, layer.norm_eps, rows_.tokens, size_, sum_.data());
    for (int64_t t = 0; t < rows_.tokens; ++t) {
        float* const part = parts_.data() + (t * ranks + top_k_) * size_;
        rms_norm(part, layer.shared_after_norm, layer.norm_eps, 1, size_, part);
        for (int64_t i = 0; i < size_; ++i) {
            sum_[static_cast<size_t>(t * size_ + i)] += part[i];
        }
    }
}

ExpertLayers::Outcome ExpertLayers::run(size_t at, const PassRows& rows, const std::function<bool()>& is_interrupted) {
    const ExpertLayerView& layer = layers_[at];
    rows_ = rows;
    top_k_ = choice_ == nullptr ? layer.top_k : choice_->top_k(layer.top_k);
    Outcome outcome;
    const auto ended = [&outcome](End end) {
        outcome.end = end;
        return outcome;
    };
    const int64_t started_ns = now_ns();
    advice.clear();
    shares.clear();
    path_shares.clear();
    if (!route(layer)) {
        return ended(End::kNoMemory);
    }
    parts_.resize(static_cast<size_t>(rows_.tokens * ranks_of(layer) * size_));
    if (!select(layer)) {
        return ended(End::kNoMemory);
    }
    outcome.dense_ns = now_ns() - started_ns;
    if (paths_.num_experts > 0) {
        chosen_of_[at] = chosen;
    }
    requested_ = group(layer);
    count_predicted(outcome);
    if (has_one() && !is_again()) {
        thresholds_.observe(layer.layer, chosen.data(), top_k_);
    }

    Leases leases(reads_);
    if (!reads_.request_and_queue(layer.layer, requested_, leases.hits, leases.misses)) {  // reads start before the hits compute
        return ended(End::kClosed);
    }
    End end = compute_present(layer, leases.hits, leases.misses, outcome);
    if (end != End::kDone) {
        return ended(end);
    }
    end = compute_missing(layer, leases.misses, is_interrupted, outcome);
    if (end != End::kDone) {
        return ended(end);
    }
    add_outputs(layer);
    return outcome;
}

}  // namespace moec
