// Thresholds of the prefetch rule `likely`: the margin from which an expert is read ahead. The margin of an expert is the
// logarithm of its score over that of the first expert that would not be chosen. The specification is
// runtime/prefetch/read_ahead_margins.py.

#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace moec {

// The best experts of a layer and their scores, likeliest first: top_k + 1 of them, or all if there are fewer.
struct Ranked {
    std::vector<int64_t> experts;
    std::vector<double> scores;
};

// The constants of the specification (RULES in runtime/prefetch/read_ahead_margins.py).
struct ThresholdRules {
    double wrong, right, first, least, most, floor;
};

class LearnedThresholds {
  public:
    using Experts = std::vector<int64_t>;

    explicit LearnedThresholds(const ThresholdRules& rules) : rules_(rules) {}

    double threshold(int64_t running, int64_t layer, int64_t rank) const;
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

}  // namespace moec
