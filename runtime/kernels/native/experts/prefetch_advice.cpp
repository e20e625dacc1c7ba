// Prefetch advice: which experts of later layers are read ahead. `look_ahead` ranks the experts of these layers by router, by
// path, or by scores that no token changes. It hands the best ones to the cache. For one token it takes a fixed number, or
// those above their learned thresholds. For several tokens it adds their scores, and takes a number for each token. The
// specification is runtime/prefetch/advisor.py, which advises passes in steps.

#include <algorithm>
#include <functional>

#include "experts/expert_layers.h"

namespace moec {

namespace {

template <class Float>
Ranked ranked(const Float* scores, int64_t size, int64_t count) {
    Ranked found;
    found.experts = largest(scores, size, count);
    for (const int64_t expert : found.experts) {
        found.scores.push_back(scores[expert]);
    }
    return found;
}

}  // namespace

// The best experts of a later layer. row: shares of the next router, [width]; moved on if they are used.
Ranked ExpertLayers::predict(const LayerAhead& ahead, const float*& row, int64_t width) {
    if (ahead.router.matrix != nullptr) {
        const float* const own = row;
        row += width;
        return ranked(own, width, std::max(ahead.top_k + 1, ahead.advised));
    }
    if (ahead.path.last < 0) {
        return ahead.known;
    }
    static const std::vector<int32_t> none;
    const std::vector<int32_t>& before = ahead.path.before < 0 ? none : chosen_of_[static_cast<size_t>(ahead.path.before)];
    const std::vector<int32_t>& last = chosen_of_[static_cast<size_t>(ahead.path.last)];
    if (!path_scores(paths_, ahead.layer, ahead.path, before, last, path_shares)) {
        path_shares.clear();
        return ahead.known;
    }
    return ranked(path_shares.data(), ahead.num_experts, std::max(ahead.top_k + 1, ahead.advised));
}

// The experts of a later layer that are worth reading ahead, likeliest first.
ExpertLayers::Indices ExpertLayers::advised(const ExpertLayerView& layer, const LayerAhead& ahead, const Ranked& best) {
    if (ahead.advised < 0) {
        return thresholds_.likely(layer.layer, ahead.layer, ahead.rank, best, ahead.top_k);
    }
    const int64_t count = std::min(ahead.advised, static_cast<int64_t>(best.experts.size()));
    return Indices(best.experts.begin(), best.experts.begin() + count);
}

bool ExpertLayers::is_held(const LayerAhead& ahead, const Indices& experts) {
    return std::all_of(experts.begin(), experts.end(),
                       [&](int64_t expert) { return reads_.is_held(ahead.first_expert + expert); });
}

void ExpertLayers::take_advice(const LayerAhead& ahead, const Indices& experts) {
    for (const int64_t expert : experts) {
        advice.push_back(ahead.first_expert + expert);
    }
    if (ahead.rank == 1) {
        predicted_ = experts;
        predicted_.resize(std::min(experts.size(), static_cast<size_t>(ahead.predicted)));
        has_predicted_ = true;
    }
}

bool ExpertLayers::look_ahead_of_one(const ExpertLayerView& layer) {
    std::vector<NormedRouter> routers;
    for (const LayerAhead& ahead : layer.ahead) {
        if (ahead.router.matrix != nullptr) {
            routers.push_back(ahead.router);
        }
    }
    const size_t width = routers.empty() ? 0 : static_cast<size_t>(routers[0].matrix->rows);
    shares.resize(routers.size() * width);
    if (!routers.empty() &&
        !router_shares(routers.data(), static_cast<int64_t>(routers.size()), ahead_eps_, rows_.hidden, shares.data())) {
        return false;
    }
    const float* row = shares.data();
    for (const LayerAhead& ahead : layer.ahead) {
        const Ranked best = predict(ahead, row, static_cast<int64_t>(width));
        const Indices likely = advised(layer, ahead, best);
        take_advice(ahead, likely);
        if (ahead.stops_at_miss && !is_held(ahead, likely)) {
            break;
        }
    }
    return true;
}

// The number of experts of a later layer that are worth reading ahead for the tokens of this pass. After a prompt of one
// sequence, the next pass has one token. Of that token only popularity is known, which learned thresholds do not take.
int64_t ExpertLayers::advised_to_many(const ExpertLayerView& layer, const LayerAhead& ahead) const {
    const bool is_of_next_pass = ahead.layer <= layer.layer;
    if (ahead.rank > 1 && rows_.tokens * ahead.top_k < limits_.choices_for_all * ahead.num_experts) {
        return 0;
    }
    if (is_of_next_pass && rows_.sequences == 1 && rows_.tokens < limits_.most_tokens) {
        return ahead.advised < 0 ? 0 : ahead.advised_each;
    }
    return rows_.tokens * ahead.advised_each;
}

// The best experts of a later layer for all tokens together, at most `count`. Returns false without memory.
bool ExpertLayers::predict_many(const LayerAhead& ahead, int64_t count, Indices& experts) {
    if (ahead.router.matrix != nullptr) {
        std::vector<float> demand(static_cast<size_t>(ahead.router.matrix->rows));
        if (!router_demand(ahead.router, ahead_eps_, rows_.hidden, rows_.tokens, demand.data())) {
            return false;
        }
        experts = largest(demand.data(), ahead.router.matrix->rows, count);
        return true;
    }
    if (ahead.path.last >= 0) {
        std::vector<double> total(static_cast<size_t>(paths_.num_experts), 0.0);
        if (add_path_scores(ahead, total)) {
            experts = largest(total.data(), ahead.num_experts, count);
            return true;
        }
    }
    const auto begin = ahead.known.experts.begin();
    experts.assign(begin, begin + std::min(count, static_cast<int64_t>(ahead.known.experts.size())));
    return true;
}

// Adds the scores that the paths of the tokens give. Returns false if no path is known.
bool ExpertLayers::add_path_scores(const LayerAhead& ahead, std::vector<double>& total) {
    const std::vector<int32_t>& last = chosen_of_[static_cast<size_t>(ahead.path.last)];
    const std::vector<int32_t>* const before =
        ahead.path.before < 0 ? nullptr : &chosen_of_[static_cast<size_t>(ahead.path.before)];
    const auto of_token = [this](const std::vector<int32_t>& all, int64_t token) {
        const int64_t top_k = static_cast<int64_t>(all.size()) / rows_.tokens;
        return std::vector<int32_t>(all.begin() + token * top_k, all.begin() + (token + 1) * top_k);
    };
    bool is_any_known = false;
    for (int64_t t = 0; t < rows_.tokens; ++t) {
        const std::vector<int32_t> earlier = before == nullptr ? std::vector<int32_t>() : of_token(*before, t);
        if (path_scores(paths_, ahead.layer, ahead.path, earlier, of_token(last, t), path_shares)) {
            is_any_known = true;
            std::transform(total.begin(), total.end(), path_shares.begin(), total.begin(), std::plus<double>());
        }
    }
    return is_any_known;
}

bool ExpertLayers::look_ahead_of_many(const ExpertLayerView& layer) {
    for (const LayerAhead& ahead : layer.ahead) {
        const int64_t count = advised_to_many(layer, ahead);
        if (count == 0) {
            continue;
        }
        Indices experts;
        if (!predict_many(ahead, count, experts)) {
            return false;
        }
        take_advice(ahead, experts);
        if (ahead.stops_at_miss && !is_held(ahead, experts)) {
            break;
        }
    }
    return true;
}

bool ExpertLayers::look_ahead(const ExpertLayerView& layer) {
    if (!(has_one() ? look_ahead_of_one(layer) : look_ahead_of_many(layer))) {
        return false;
    }
    if (!advice.empty()) {  // without new advice the older advice stays
        reads_.prefetch(advice);
    }
    return true;
}

}  // namespace moec
