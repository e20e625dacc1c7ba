// Prefetch advice of a pass of one token: which experts of later layers are read ahead. `look_ahead` gets the router shares of
// these layers and hands the experts above their thresholds to the cache. The specification is runtime/prefetch/advisor.py,
// which advises every other pass.

#include "experts/expert_layers.h"

namespace moec {

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
        Ranked ranked;
        if (ahead.router.matrix != nullptr) {
            ranked.experts = largest(row, static_cast<int64_t>(width), ahead.top_k + 1);
            for (const int64_t expert : ranked.experts) {
                ranked.scores.push_back(row[expert]);
            }
            row += width;
        }
        const Ranked& best = ahead.router.matrix != nullptr ? ranked : ahead.known;
        const Indices likely = thresholds_.likely(layer.layer, ahead.layer, ahead.rank, best, ahead.top_k);
        for (const int64_t expert : likely) {
            advice.push_back(ahead.first_expert + expert);
        }
        if (ahead.rank == 1) {
            predicted_ = likely;
            has_predicted_ = true;
        }
    }
    if (!advice.empty()) {  // without new advice the older advice stays
        reads_.prefetch(advice);
    }
    return true;
}

}  // namespace moec
