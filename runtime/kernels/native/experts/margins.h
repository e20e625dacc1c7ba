// How sure a prediction must be before an expert is read ahead. runtime/prefetch/margins.py is the specification.

#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace moec {

// The best of a layer's experts by a score, likeliest first; one more than it chooses, if it has so many.
struct Ranked {
    std::vector<int64_t> experts;
    std::vector<double> scores;
};

// The constants of the specification.
struct MarginRules {
    double wrong, right, first, least, most, floor;
};

class LearnedMargins {
  public:
    using Experts = std::vector<int64_t>;

    explicit LearnedMargins(const MarginRules& rules) : rules_(rules) {}

    double margin(int64_t running, int64_t layer, int64_t rank) const;
    Experts likely(int64_t running, int64_t layer, int64_t rank, const Ranked& ranked, int64_t top_k);
    void observe(int64_t layer, const int32_t* chosen, int64_t count);
    void forget_guesses() { guesses_.clear(); }

  private:
    struct Guess {
        int64_t running;
        double margin;
        Experts nearest;
    };

    MarginRules rules_;
    std::map<std::pair<int64_t, int64_t>, double> margins_;  // by running layer and layer
    std::map<int64_t, std::vector<Guess>> guesses_;          // by layer
};

}  // namespace moec
