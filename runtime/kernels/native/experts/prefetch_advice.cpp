// Prefetch advice of a pass of one token: which experts of later layers are read ahead. `look_ahead` ranks the experts of
// these layers by router, by path, or by scores that no token changes. It hands the best ones to the cache: a fixed
// number, or those above their learned thresholds. The specification is runtime/prefetch/advisor.py, which advises every
// other pass.

#include <algorithm>

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

bool ExpertLayers::look_ahead(const ExpertLayerView& layer, const float* hidden) {
    std::vector<NormedRouter> routers;
    for (const LayerAhead& ahead : layer.ahead) {
        if (ahead.router.matrix != nullptr) {
            routers.push_back(ahead.router);
        }
    }
    const size_t width = routers.empty() ? 0 : static_cast<size_t>(routers[0].matrix->rows);
    shares.resize(routers.size() * width);
    if (!routers.empty() &&
        !router_shares(routers.data(), static_cast<int64_t>(routers.size()), ahead_eps_, hidden, shares.data())) {
        return false;
    }
    const float* row = shares.data();
    for (const LayerAhead& ahead : layer.ahead) {
        const Ranked best = predict(ahead, row, static_cast<int64_t>(width));
        const Indices likely = advised(layer, ahead, best);
        for (const int64_t expert : likely) {
            advice.push_back(ahead.first_expert + expert);
        }
        if (ahead.rank == 1) {
            predicted_ = likely;
            predicted_.resize(std::min(likely.size(), static_cast<size_t>(ahead.predicted)));
            has_predicted_ = true;
        }
        if (ahead.stops_at_miss && !is_held(ahead, likely)) {
            break;
        }
    }
    if (!advice.empty()) {  // without new advice the older advice stays
        reads_.prefetch(advice);
    }
    return true;
}

}  // namespace moec
