#include "prefetch/thresholds.h"

#include <algorithm>
#include <cmath>

namespace moec {

double LearnedThresholds::threshold(int64_t running, int64_t layer, int64_t rank) const {
    const auto found = thresholds_.find({running, layer});
    return found != thresholds_.end() ? found->second : rules_.first * static_cast<double>(rank);
}

LearnedThresholds::Experts LearnedThresholds::likely(int64_t running, int64_t layer, int64_t rank,
                                                     const Ranked& ranked, int64_t top_k) {
    const std::vector<double>& scores = ranked.scores;
    const int64_t found = static_cast<int64_t>(scores.size()), known = std::min(found, top_k);
    const double own = threshold(running, layer, rank);
    const double least =
        found > top_k ? std::max(scores[static_cast<size_t>(top_k)], scores[0] * rules_.floor) * std::exp(own) : 0.0;
    const int64_t count =
        std::count_if(scores.begin(), scores.begin() + known, [least](double score) { return score >= least && score > 0; });
    const auto begin = ranked.experts.begin();
    const int64_t from = std::max(count - 1, int64_t{0}), to = std::max(std::min(count + 1, known), from);
    guesses_[layer].push_back({running, own, Experts(begin + from, begin + to)});
    return Experts(begin, begin + count);
}

void LearnedThresholds::observe(int64_t layer, const int32_t* chosen, int64_t count) {
    const auto guesses = guesses_.find(layer);
    if (guesses == guesses_.end()) {
        return;
    }
    for (const Guess& guess : guesses->second) {
        double moved = guess.threshold;
        for (const int64_t expert : guess.nearest) {
            moved *= std::find(chosen, chosen + count, expert) != chosen + count ? rules_.right : rules_.wrong;
        }
        thresholds_[{guess.running, layer}] = std::min(std::max(moved, rules_.least), rules_.most);
    }
    guesses_.erase(guesses);
}

}  // namespace moec
