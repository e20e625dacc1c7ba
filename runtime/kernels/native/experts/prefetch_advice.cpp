// Prefetch advice: which experts of later layers are read ahead. `look_ahead` ranks the experts of these layers by router, by
// path, or by scores that no token changes. It hands the best ones to the cache. For one token it takes a fixed number, or
// those above their learned thresholds. For several tokens it adds their scores, and takes a number for each token. The
// specification is runtime/prefetch/advisor.py, which advises passes in steps.

#include <algorithm>
#include <cmath>
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

bool any(const std::vector<double>& scores) {
    return std::any_of(scores.begin(), scores.end(), [](double score) { return score != 0.0; });
}

// Add the shares of one row of the dictionary. An expert that stands twice in the row counts once, as in numpy.
void add_row(const PathTables& tables, int64_t row, std::vector<double>& scores, std::vector<double>& sums) {
    const int64_t begin = tables.offsets[row], end = tables.offsets[row + 1];
    double total = 0.0;
    for (int64_t at = begin; at < end; ++at) {
        total += static_cast<double>(tables.counts[at]);
    }
    if (total < tables.least_count) {
        return;
    }
    sums.clear();
    for (int64_t at = begin; at < end; ++at) {
        sums.push_back(scores[tables.experts[at]] + static_cast<double>(tables.counts[at]) / total);
    }
    for (int64_t at = begin; at < end; ++at) {
        scores[tables.experts[at]] = sums[static_cast<size_t>(at - begin)];
    }
}

// Add the shares of every pair of experts of two layers.
void add_pairs(const PathTables& tables, int64_t following, const std::vector<int32_t>& before, const std::vector<int32_t>& chosen,
               std::vector<double>& scores, std::vector<double>& sums) {
    for (const int32_t last : chosen) {
        for (const int32_t one : before) {
            const int64_t key = (following * tables.num_experts + one) * tables.num_experts + last;
            const int64_t* const end = tables.keys + tables.num_keys;
            const int64_t* const found = std::lower_bound(tables.keys, end, key);
            if (found != end && *found == key) {
                add_row(tables, found - tables.keys, scores, sums);
            }
        }
    }
}

// Add the shares of the exact sets of experts of two layers. Sets of another size are not in the dictionary.
void add_sets(const PathTables& tables, int64_t following, const std::vector<int32_t>& before, const std::vector<int32_t>& chosen,
              std::vector<double>& scores, std::vector<double>& sums) {
    const auto top_k = static_cast<size_t>(tables.top_k), width = 1 + 2 * top_k;
    if (before.size() != top_k || chosen.size() != top_k) {
        return;
    }
    std::vector<uint16_t> key{static_cast<uint16_t>(following)};
    key.insert(key.end(), before.begin(), before.end());
    key.insert(key.end(), chosen.begin(), chosen.end());
    const auto middle = key.begin() + 1 + tables.top_k;
    std::sort(key.begin() + 1, middle);
    std::sort(middle, key.end());
    int64_t low = 0, high = tables.num_keys;
    while (low < high) {
        const int64_t at = low + (high - low) / 2;
        const uint16_t* const row = tables.sets + static_cast<size_t>(at) * width;
        if (std::lexicographical_compare(row, row + width, key.begin(), key.end())) {
            low = at + 1;
        } else {
            high = at;
        }
    }
    if (low < tables.num_keys && std::equal(key.begin(), key.end(), tables.sets + static_cast<size_t>(low) * width)) {
        add_row(tables, low, scores, sums);
    }
}

void add_transitions(const PathTables& tables, int64_t layer, int32_t last, std::vector<double>& scores) {
    const uint32_t* const counts = tables.transitions + (layer * tables.num_experts + last) * tables.num_experts;
    double total = 0.0;
    for (int64_t e = 0; e < tables.num_experts; ++e) {
        total += static_cast<double>(counts[e]);
    }
    total = std::max(total, 1.0);
    for (int64_t e = 0; e < tables.num_experts; ++e) {
        scores[static_cast<size_t>(e)] += static_cast<double>(counts[e]) / total;
    }
}

// Scores of the experts of layer `following`, [E]. before, chosen: experts of the token in the two layers of `source`.
// Returns false if nothing is known of them: all scores are 0.
// Specification: PathPredictor in runtime/prefetch/predictors.py.
bool path_scores(const PathTables& tables, int64_t following, const PathSource& source, const std::vector<int32_t>& before,
                 const std::vector<int32_t>& chosen, std::vector<double>& scores) {
    scores.assign(static_cast<size_t>(tables.num_experts), 0.0);
    std::vector<double> sums;
    if (tables.sets != nullptr) {
        add_sets(tables, following, before, chosen, scores, sums);
    } else {
        add_pairs(tables, following, before, chosen, scores, sums);
    }
    if (any(scores)) {
        return true;
    }
    for (const int32_t last : chosen) {
        add_transitions(tables, source.last, last, scores);
    }
    return any(scores);
}

}  // namespace

double LearnedThresholds::threshold(int64_t running, int64_t layer) const {
    const auto found = thresholds_.find({running, layer});
    return found != thresholds_.end() ? found->second : 0.0;
}

LearnedThresholds::Experts LearnedThresholds::likely(int64_t running, int64_t layer, int64_t rank,
                                                     const Ranked& ranked, int64_t top_k) {
    const std::vector<double>& scores = ranked.scores;
    const int64_t found = static_cast<int64_t>(scores.size()), known = std::min(found, top_k);
    const double next_best = found > top_k ? std::max(scores[static_cast<size_t>(top_k)], scores[0] * rules_.floor) : 0.0;
    if (next_best > 0 && thresholds_.find({running, layer}) == thresholds_.end()) {
        const double first = rules_.first * static_cast<double>(rank) * std::log(scores[0] / next_best);
        thresholds_[{running, layer}] = std::min(std::max(first, rules_.least), rules_.most);
    }
    const double own = threshold(running, layer), least = next_best * std::exp(own);
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

// The best experts of a later layer. row: shares of the next router, [width]; moved on if they are used.
Ranked ExpertLayers::predict(const LayerAhead& ahead, const float*& row, int64_t width) {
    const AheadCounts& counts = counts_of(ahead);
    if (ahead.router.matrix != nullptr) {
        const float* const own = row;
        row += width;
        return ranked(own, width, std::max(counts.top_k + 1, counts.advised));
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
    return ranked(path_shares.data(), ahead.num_experts, std::max(counts.top_k + 1, counts.advised));
}

// The experts of a later layer that are worth reading ahead, likeliest first.
ExpertLayers::Indices ExpertLayers::advised(const ExpertLayerView& layer, const LayerAhead& ahead, const Ranked& best) {
    const AheadCounts& counts = counts_of(ahead);
    if (counts.advised < 0) {
        return thresholds_.likely(layer.layer, ahead.layer, ahead.rank, best, counts.top_k);
    }
    const int64_t count = std::min(counts.advised, static_cast<int64_t>(best.experts.size()));
    return Indices(best.experts.begin(), best.experts.begin() + count);
}

// Whether no expert has to be read. Where lossy modes decide by a logical cache, it says so: advice must not depend on when
// a read ends either.
bool ExpertLayers::is_held(const Indices& stored) {
    const LogicalCache* const logical = choice_ == nullptr ? nullptr : choice_->cache();
    return std::all_of(stored.begin(), stored.end(), [&](int64_t index) {
        return logical == nullptr ? reads_.is_held(index) : logical->is_resident(index);
    });
}

// Advises stored experts. Returns false if layers further ahead get no advice.
bool ExpertLayers::take_advice(const LayerAhead& ahead, const Indices& experts, const Indices& stored) {
    advice.insert(advice.end(), stored.begin(), stored.end());
    if (ahead.rank == 1) {
        predicted_ = experts;
        predicted_.resize(std::min(experts.size(), static_cast<size_t>(counts_of(ahead).predicted)));
        has_predicted_ = true;
    }
    return !ahead.stops_at_miss || is_held(stored);
}

// Whether a layer is looked at in this pass: the next one, or a later one for a single token, or for so many tokens that they
// need nearly all of its experts.
bool ExpertLayers::is_near(const LayerAhead& ahead) const {
    const int64_t choices = rows_.tokens * ahead.counts[0].top_k;
    return ahead.rank == 1 || has_one() || choices >= limits_.choices_for_all * ahead.num_experts;
}

const AheadCounts& ExpertLayers::counts_of(const LayerAhead& ahead) const {
    const size_t kind = choice_ == nullptr ? 0 : choice_->kind() == PassKind::kLittle ? 1 : is_again() ? 2 : 0;
    return ahead.counts[kind];
}

// The stored experts of predicted ones, for one token. is_float: the scores are of float32, and so is their sum.
ExpertLayers::Indices ExpertLayers::stored_for_one(const LayerAhead& ahead, const Indices& experts, const Ranked& best,
                                                   bool is_float) const {
    if (choice_ == nullptr) {
        return stored_for_many(ahead, experts, {});
    }
    const size_t count = std::min(best.scores.size(), static_cast<size_t>(counts_of(ahead).top_k));
    std::vector<double> rising(best.scores.begin(), best.scores.begin() + static_cast<int64_t>(count));
    std::reverse(rising.begin(), rising.end());
    const std::vector<float> floats(rising.begin(), rising.end());
    const double total = is_float ? numpy_sum(floats.data(), static_cast<int64_t>(count))
                                  : numpy_sum(rising.data(), static_cast<int64_t>(count));
    return choice_->advised(ahead.first_expert, ahead.num_experts, experts, best.scores, total);
}

ExpertLayers::Indices ExpertLayers::stored_for_many(const LayerAhead& ahead, const Indices& experts,
                                                    const std::vector<float>& least) const {
    if (choice_ != nullptr) {
        return choice_->advised_to_many(ahead.first_expert, ahead.num_experts, experts, least);
    }
    Indices stored = experts;
    for (int64_t& index : stored) {
        index += ahead.first_expert;
    }
    return stored;
}

bool ExpertLayers::look_ahead_of_one(const ExpertLayerView& layer) {
    std::vector<NormedRouter> routers;
    for (const LayerAhead& ahead : layer.ahead) {
        if (ahead.router.matrix != nullptr && counts_of(ahead).advised != 0) {
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
        if (counts_of(ahead).advised == 0) {
            continue;
        }
        const Ranked best = predict(ahead, row, static_cast<int64_t>(width));
        const Indices likely = advised(layer, ahead, best);
        if (!take_advice(ahead, likely, stored_for_one(ahead, likely, best, ahead.router.matrix != nullptr))) {
            break;
        }
    }
    return true;
}

// The layers of a pass that is computed again, as the discarded pass routed them.
bool ExpertLayers::look_ahead_again(const ExpertLayerView& layer) {
    for (const LayerAhead& ahead : layer.ahead) {
        const AheadCounts& counts = counts_of(ahead);
        const float* const foretold = ahead.layer > layer.layer ? choice_->foretold(ahead.layer) : nullptr;
        const int64_t count = rows_.tokens * counts.advised_each;
        if (foretold == nullptr || !is_near(ahead) || count == 0) {
            continue;
        }
        std::vector<float> demand(static_cast<size_t>(ahead.num_experts), 0.0f), least;
        layers_[static_cast<size_t>(ahead.layer)].routing.add_demand(foretold, rows_.tokens, demand);
        const Ranked best = ranked(demand.data(), ahead.num_experts, std::max(counts.top_k, count));
        const int64_t taken = std::min(count, static_cast<int64_t>(best.experts.size()));
        const Indices experts(best.experts.begin(), best.experts.begin() + taken);
        if (!has_one() && !foresee(ahead, foretold, least)) {
            return false;
        }
        if (!take_advice(ahead, experts,
                         has_one() ? stored_for_one(ahead, experts, best, true) : stored_for_many(ahead, experts, least))) {
            break;
        }
    }
    return true;
}

// The least unimportance that predicted logits [T, E] give the experts of a later layer, if lossy modes read it.
bool ExpertLayers::foresee(const LayerAhead& ahead, const float* predicted, std::vector<float>& least) const {
    if (choice_ == nullptr || !choice_->reads_unimportance()) {
        return true;
    }
    const int64_t top_k = counts_of(ahead).top_k;
    std::vector<int32_t> likely(static_cast<size_t>(rows_.tokens * top_k));
    std::vector<float> weights(likely.size());
    const LayerRouting& routing = layers_[static_cast<size_t>(ahead.layer)].routing;
    if (!routing.choose(predicted, rows_.tokens, top_k, likely.data(), weights.data())) {
        return false;
    }
    least = least_unimportance(likely.data(), weights.data(), rows_.tokens, top_k, ahead.num_experts);
    return true;
}

// The number of experts of a later layer that are worth reading ahead for the tokens of this pass. After a prompt of one
// sequence, the next pass has one token, and after an encoder, one of each sequence. Of the token after a prompt only
// popularity is known, which learned thresholds do not take.
int64_t ExpertLayers::advised_to_many(const ExpertLayerView& layer, const LayerAhead& ahead) const {
    const bool is_of_next_pass = ahead.layer <= layer.layer;
    const bool is_after_encoder = layer.layer < limits_.first_decoder && limits_.first_decoder <= ahead.layer;
    const AheadCounts& counts = counts_of(ahead);
    if (!is_near(ahead)) {
        return 0;
    }
    int64_t tokens = rows_.tokens;
    if (is_after_encoder) {
        tokens = std::min(tokens, rows_.sequences);
    } else if (is_of_next_pass && rows_.sequences == 1 && tokens < limits_.most_tokens) {
        tokens = 1;
    }
    return tokens == 1 && counts.advised < 0 ? 0 : tokens * counts.advised_each;
}

// The best experts of a later layer for all tokens together, at most `count`. Returns false without memory.
bool ExpertLayers::predict_many(const LayerAhead& ahead, int64_t count, Indices& experts, std::vector<float>& least) {
    if (ahead.router.matrix != nullptr) {
        const size_t width = static_cast<size_t>(ahead.router.matrix->rows);
        std::vector<float> demand(width), predicted(static_cast<size_t>(rows_.tokens) * width);
        if (!router_logits(ahead.router, ahead_eps_, rows_.hidden, rows_.tokens, predicted.data()) ||
            !foresee(ahead, predicted.data(), least)) {
            return false;
        }
        router_demand(ahead.router, predicted.data(), rows_.tokens, demand.data());
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
        std::vector<float> least;
        if (!predict_many(ahead, count, experts, least)) {
            return false;
        }
        if (!take_advice(ahead, experts, stored_for_many(ahead, experts, least))) {
            break;
        }
    }
    return true;
}

ExpertLayers::End ExpertLayers::look_ahead(const ExpertLayerView& layer, Outcome& outcome) {
    const bool has_memory = is_again()  ? look_ahead_again(layer)
                            : has_one() ? look_ahead_of_one(layer)
                                        : look_ahead_of_many(layer);
    if (!has_memory) {
        return End::kNoMemory;
    }
    if (choice_ != nullptr) {
        outcome.expert = choice_->requested(layer.layer, requested_, advice);
    }
    if (!advice.empty()) {  // without new advice the older advice stays
        reads_.prefetch(advice);
    }
    return outcome.expert < 0 ? End::kDone : End::kTooLarge;
}

}  // namespace moec
