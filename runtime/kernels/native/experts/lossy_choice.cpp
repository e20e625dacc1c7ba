// Decisions of lossy modes. Few values per token, so the steps are scalar, in the order and the types of the specification.

#include "experts/lossy_choice.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace moec {
namespace {

// The shares of a token's weights, [K].
std::vector<float> shares_of(const float* weights, int64_t top_k) {
    const float sum = numpy_sum(weights, top_k), total = sum == 0.0f ? 1.0f : sum;
    std::vector<float> shares(weights, weights + top_k);
    std::transform(shares.begin(), shares.end(), shares.begin(), [total](float weight) { return weight / total; });
    return shares;
}

// Ranks of a token, largest share first.
std::vector<int64_t> by_share(const std::vector<float>& shares) {
    return largest(shares.data(), static_cast<int64_t>(shares.size()), static_cast<int64_t>(shares.size()));
}

}  // namespace

std::vector<float> least_unimportance(const int32_t* chosen, const float* weights, int64_t tokens, int64_t top_k,
                                      int64_t experts) {
    std::vector<float> least(static_cast<size_t>(experts), kNotChosen);
    for (int64_t t = 0; t < tokens; ++t) {
        const std::vector<float> shares = shares_of(weights + t * top_k, top_k);
        double before = 0.0;
        for (const int64_t rank : by_share(shares)) {
            const int32_t expert = chosen[t * top_k + rank];
            if (expert != kNoExpert) {
                float& own = least[static_cast<size_t>(expert)];
                own = own <= static_cast<float>(before) ? own : static_cast<float>(before);  // NaN stays
            }
            before += shares[static_cast<size_t>(rank)];
        }
    }
    return least;
}

LossyChoice::LossyChoice(const LossyRules& rules, LogicalCache* cache, std::vector<int64_t> low)
    : rules_(rules), cache_(cache), low_(std::move(low)) {
    const int64_t count = static_cast<int64_t>(low_.size());
    for (int64_t expert = 0; expert < count; ++expert) {
        const int64_t place = low_[static_cast<size_t>(expert)] - count;
        if (place >= 0) {
            high_.resize(std::max(high_.size(), static_cast<size_t>(place) + 1), -1);
            high_[static_cast<size_t>(place)] = expert;
        }
    }
}

void LossyChoice::begin_pass(PassKind kind, std::map<int64_t, std::vector<float>> foretold) {
    kind_ = kind;
    foretold_ = std::move(foretold);
}

int64_t LossyChoice::top_k(int64_t own) const {
    if (kind_ != PassKind::kLittle) {
        return own;
    }
    return std::min(rules_.little_experts > 0 ? rules_.little_experts : std::max(own / 2, int64_t{1}), own);
}

const float* LossyChoice::foretold(int64_t layer) const {
    const auto found = foretold_.find(layer);
    return found == foretold_.end() ? nullptr : found->second.data();
}

int64_t LossyChoice::stored(int64_t first_expert, int64_t experts, int64_t version) const {
    return version < experts ? first_expert + version : low_[static_cast<size_t>(first_expert + version - experts)];
}

int64_t LossyChoice::version_of(int64_t first_expert, int64_t experts, int64_t stored) const {
    const int64_t count = static_cast<int64_t>(low_.size());
    return stored < count ? stored - first_expert : high_[static_cast<size_t>(stored - count)] - first_expert + experts;
}

int64_t LossyChoice::low_of(int64_t first_expert, int64_t count, int64_t expert) const {
    return low_[static_cast<size_t>(first_expert + expert)] < 0 ? kNoExpert : expert + count;
}

bool LossyChoice::holds(int64_t first_expert, int64_t count, int64_t version) const {
    return cache_ != nullptr && cache_->is_resident(stored(first_expert, count, version));
}

int64_t LossyChoice::requested(int64_t layer, const Indices& experts, const Indices& ahead) {
    return cache_ == nullptr ? -1 : cache_->serve(layer, experts, ahead);
}

bool LossyChoice::select(const Routed& routed, std::vector<int32_t>& versions, std::vector<float>& weights) {
    if (kind_ == PassKind::kPrompt) {
        if (rules_.has_precision) {
            take_versions(routed, versions, weights);
        }
        return true;
    }
    count_choice(routed, versions, weights);
    if (kind_ == PassKind::kAgain && !count_foretold(routed, versions)) {
        return false;
    }
    if (rules_.has_routing) {
        take_cached(routed, versions, weights);
    }
    if (rules_.has_precision) {
        take_versions(routed, versions, weights);
    }
    return true;
}

void LossyChoice::count_choice(const Routed& routed, const std::vector<int32_t>& chosen, const std::vector<float>& weights) {
    counts.ranks += static_cast<int64_t>(chosen.size());
    if (cache_ != nullptr) {
        counts.missed += std::count_if(chosen.begin(), chosen.end(), [&](int32_t expert) {
            return !holds(routed.first_expert, routed.routing->experts, expert);
        });
    }
    if (kind_ == PassKind::kLittle) {
        return;
    }
    counts.routings += routed.tokens;
    std::vector<float> shares;
    for (int64_t t = 0; t < routed.tokens; ++t) {
        const float* const own = weights.data() + t * routed.top_k;
        std::vector<float> ranked(own, own + routed.top_k);
        std::sort(ranked.begin(), ranked.end(),
                  [](float one, float other) { return one < other || (std::isnan(other) && !std::isnan(one)); });
        shares.push_back(numpy_sum(ranked.data(), routed.top_k / 2) / std::max(numpy_sum(own, routed.top_k), 1e-20f));
    }
    counts.lower_half += numpy_sum(shares.data(), routed.tokens);
}

bool LossyChoice::count_foretold(const Routed& routed, const std::vector<int32_t>& chosen) {
    std::vector<int32_t> before(chosen.size());
    std::vector<float> weights(chosen.size());
    const float* const logits = foretold(routed.layer);
    if (logits == nullptr) {
        return true;
    }
    if (!routed.routing->choose(logits, routed.tokens, routed.top_k, before.data(), weights.data())) {
        return false;
    }
    counts.foretold += static_cast<int64_t>(before.size());
    for (size_t at = 0; at < before.size(); ++at) {
        const auto own = chosen.begin() + static_cast<int64_t>(at) / routed.top_k * routed.top_k;
        counts.foretold_right += std::find(own, own + routed.top_k, before[at]) != own + routed.top_k;
    }
    return true;
}

// -- cache routing ----------------------------------------------------------------------------------------------------

// Replaces misses by cached experts within the margin, or drops them. The best expert of a token stays.
void LossyChoice::take_cached(const Routed& routed, std::vector<int32_t>& chosen, std::vector<float>& weights) {
    bool is_changed = false;
    for (int64_t t = 0; t < routed.tokens; ++t) {
        int32_t* const row = chosen.data() + t * routed.top_k;
        const std::vector<float> shares = shares_of(weights.data() + t * routed.top_k, routed.top_k);
        Candidates near;  // made at the first miss
        double unimportance = 0.0;
        for (const int64_t rank : by_share(shares)) {
            const float share = shares[static_cast<size_t>(rank)];
            if (unimportance != 0.0 && !is_cached(routed, unimportance, row[rank])) {
                near = near.scores.empty() ? candidates(routed, t) : near;
                const int64_t instead = in_place_of(routed, unimportance, near, row, rank, share);
                is_changed |= instead != row[rank];
                row[rank] = static_cast<int32_t>(instead);
            }
            unimportance += share;
        }
    }
    for (int64_t t = 0; is_changed && t < routed.tokens; ++t) {
        const int64_t at = t * routed.top_k;
        const std::vector<float> scores = routed.routing->scores(routed.logits + t * routed.routing->experts);
        routed.routing->weigh(scores, chosen.data() + at, routed.top_k, weights.data() + at);
    }
}

LossyChoice::Candidates LossyChoice::candidates(const Routed& routed, int64_t token) const {
    const int64_t count = routed.routing->experts;
    Candidates found{routed.routing->scores(routed.logits + token * count), {}};
    const std::vector<uint8_t> allowed = routed.routing->allowed(found.scores);
    for (const int64_t expert : largest(found.scores.data(), count, count)) {
        if (allowed[static_cast<size_t>(expert)] != 0) {
            found.best.push_back(expert);
        }
    }
    return found;
}

int64_t LossyChoice::in_place_of(const Routed& routed, double unimportance, const Candidates& near, const int32_t* row,
                                 int64_t rank, float share) {
    const int64_t missed = row[rank];
    const double least = (1.0 - rules_.margin) * near.scores[static_cast<size_t>(missed)];
    if (rules_.margin > 0.0 && least > 0.0) {
        const int64_t stand_in = best_cached(routed, unimportance, near, row, static_cast<float>(least));
        if (stand_in >= 0) {
            ++counts.replaced;
            return stand_in;
        }
    }
    if (static_cast<double>(share) < rules_.drop) {
        ++counts.dropped;
        return kNoExpert;
    }
    return missed;
}

// The cached expert with the best score from `least` on that the token may choose and has not chosen, or -1.
int64_t LossyChoice::best_cached(const Routed& routed, double unimportance, const Candidates& near, const int32_t* row,
                                 float least) const {
    for (const int64_t expert : near.best) {
        if (!(near.scores[static_cast<size_t>(expert)] >= least)) {
            break;
        }
        const bool is_chosen = std::find(row, row + routed.top_k, expert) != row + routed.top_k;
        if (!is_chosen && is_cached(routed, unimportance, expert)) {
            return expert;
        }
    }
    return -1;
}

// Whether an expert is computed without a read: as high version, or as low version if that is enough.
bool LossyChoice::is_cached(const Routed& routed, double unimportance, int64_t expert) const {
    const int64_t first = routed.first_expert, count = routed.routing->experts;
    if (holds(first, count, expert)) {
        return true;
    }
    const int64_t low = low_of(first, count, expert);
    return rules_.has_precision && unimportance > rules_.low_above && low >= 0 && holds(first, count, low);
}

// -- dynamic precision ------------------------------------------------------------------------------------------------

// On a miss high up to T1, low up to T2, else none. A cached low version needs no read, so it is used instead of a skip.
int64_t LossyChoice::version(int64_t first_expert, int64_t count, int64_t expert, double unimportance) const {
    if (unimportance <= rules_.low_above || holds(first_expert, count, expert)) {
        return expert;
    }
    const int64_t low = low_of(first_expert, count, expert);
    if (unimportance <= rules_.skip_above) {
        return low < 0 ? expert : low;
    }
    return low >= 0 && holds(first_expert, count, low) ? low : kNoExpert;
}

// Takes high, low or no version of each expert, as its most important token asks for. All tokens of a pass use it, so that
// an expert is read once.
void LossyChoice::take_versions(const Routed& routed, std::vector<int32_t>& chosen, std::vector<float>& weights) {
    const int64_t first = routed.first_expert, count = routed.routing->experts;
    const std::vector<float> least = least_unimportance(chosen.data(), weights.data(), routed.tokens, routed.top_k, count);
    std::vector<int32_t> versions(static_cast<size_t>(count), kNoExpert);
    int64_t asked = 0, missed = 0, low = 0, skipped = 0;
    for (int64_t expert = 0; expert < count; ++expert) {
        if (least[static_cast<size_t>(expert)] == kNotChosen) {
            continue;
        }
        const int64_t found = version(first, count, expert, least[static_cast<size_t>(expert)]);
        versions[static_cast<size_t>(expert)] = static_cast<int32_t>(found);
        ++asked;
        missed += !holds(first, count, expert);
        low += found >= count;
        skipped += found == kNoExpert;
    }
    if (kind_ == PassKind::kPrompt) {
        counts.prompt_experts += asked;
        counts.prompt_missed += missed;
        counts.prompt_low += low;
        counts.prompt_skipped += skipped;
    }
    std::vector<int32_t> computed = chosen;
    bool is_any_skipped = false;
    for (size_t at = 0; at < chosen.size(); ++at) {
        if (chosen[at] == kNoExpert) {
            continue;
        }
        const int32_t found = versions[static_cast<size_t>(chosen[at])];
        if (found == kNoExpert) {
            computed[at] = kNoExpert;
            is_any_skipped = true;
        }
        if (kind_ != PassKind::kPrompt) {
            counts.low += found >= count;
            counts.skipped += found == kNoExpert;
        }
        chosen[at] = found;
    }
    for (int64_t t = 0; is_any_skipped && routed.routing->can_weigh() && t < routed.tokens; ++t) {
        const int64_t at = t * routed.top_k;
        routed.routing->weigh(routed.routing->scores(routed.logits + t * count), computed.data() + at, routed.top_k,
                              weights.data() + at);
    }
}

// -- advice -----------------------------------------------------------------------------------------------------------

LossyChoice::Indices LossyChoice::advised(int64_t first_expert, int64_t count, const Indices& experts,
                                          const std::vector<double>& scores, double total) const {
    Indices found;
    double unimportance = 0.0;
    for (size_t at = 0; at < experts.size(); ++at) {
        const int64_t own = rules_.has_precision ? version(first_expert, count, experts[at], unimportance) : experts[at];
        if (own != kNoExpert) {
            found.push_back(stored(first_expert, count, own));
        }
        unimportance += scores[at] / (total == 0.0 ? 1.0 : total);
    }
    return found;
}

LossyChoice::Indices LossyChoice::advised_to_many(int64_t first_expert, int64_t count, const Indices& experts,
                                                  const std::vector<float>& least) const {
    Indices found;
    if (rules_.has_precision && least.empty()) {
        return found;
    }
    for (const int64_t expert : experts) {
        const double own = rules_.has_precision ? std::min(least[static_cast<size_t>(expert)], 1.0f) : 0.0;
        const int64_t taken = rules_.has_precision ? version(first_expert, count, expert, own) : expert;
        if (taken != kNoExpert) {
            found.push_back(stored(first_expert, count, taken));
        }
    }
    return found;
}

}  // namespace moec
