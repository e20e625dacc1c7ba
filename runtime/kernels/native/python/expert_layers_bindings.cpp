// Bindings of ExpertLayers, the experts of a pass. Types and meanings: runtime/kernels/_native.pyi.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/bound_cache.h"
#include "python/bindings.h"
#include "experts/expert_layers.h"

namespace moec {
namespace {

constexpr int64_t kMostChoices = 1'000'000;
constexpr const char* kEnds[] = {"done", "failed", "too large", "closed"};
// A later layer as the running one sees it:
// * rank, number, first expert, number of experts;
// * AheadCounts of one or three kinds of passes, and whether a missing expert ends the advice;
// * router, norm, bias, bias of the norm, rule; each may be None;
// * the last layer whose experts predict it and the one before, or -1;
// * known experts and their scores.
using Counts = std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>;
using Ahead = std::tuple<int64_t, int64_t, int64_t, int64_t, Counts, bool, nb::object, nb::object, nb::object, nb::object,
                         nb::object, std::pair<int64_t, int64_t>, nb::object, nb::object>;
// A routing rule that is no plain softmax: scoring, correction or None, groups, groups that are kept, whether a group is rated by
// its best two, margin, whether logits are corrected, what is added to the sum of the weights.
using Rule = std::tuple<std::string, nb::object, int64_t, int64_t, bool, float, bool, float>;

nb::object field(const nb::dict& fields, const char* name) {
    if (!fields.contains(name)) {
        refuse(std::string("fields: expected `") + name + "`");
    }
    return nb::borrow(fields[name]);
}

// Not nb::try_cast, which is noexcept: a list without enough memory would end the process.
template <class Value>
Value cast_or_refuse(nb::handle object, const char* name) {
    try {
        return nb::cast<Value>(object);
    } catch (const nb::cast_error&) {
        refuse(std::string(name) + ": found a value of another type");
    }
}

template <class Value>
Value value(const nb::dict& fields, const char* name) {
    return cast_or_refuse<Value>(field(fields, name), name);
}

BoundCache& reads_of(nb::handle object) {
    if (!nb::isinstance<BoundCache>(object)) {
        refuse("reads: expected a cache of the extension");
    }
    return nb::cast<BoundCache&>(object);
}

// Weights of all layers, kept alive.
class BoundLayers {
  public:
    BoundLayers(nb::object reads, nb::list layers, int64_t size, float ahead_eps, const nb::dict& rules, nb::handle paths,
                nb::handle lossy)
        : reads_(std::move(reads)), cache_(reads_of(reads_)) {
        if (size < 1) {
            refuse("size: expected at least 1, found " + std::to_string(size));
        }
        count_ = static_cast<int64_t>(layers.size());
        if (!paths.is_none()) {
            paths_ = paths_of(cast_or_refuse<nb::dict>(paths, "paths"));
        }
        if (!lossy.is_none()) {
            lossy_ = lossy_of(cast_or_refuse<nb::dict>(lossy, "lossy"));
        }
        std::vector<ExpertLayerView> views;
        for (nb::handle fields : layers) {
            if (!nb::isinstance<nb::dict>(fields)) {
                refuse("layers: expected a dictionary for each");
            }
            views.push_back(view_of(nb::cast<nb::dict>(fields), size));
            if (views.back().layer != static_cast<int64_t>(views.size()) - 1) {
                refuse("layer: expected the place in the list, " + std::to_string(views.size() - 1) + ", found " +
                       std::to_string(views.back().layer));
            }
        }
        expect_predictions(views);
        const auto rule = [&rules](const char* name) { return value<double>(rules, name); };
        const ThresholdRules learning{rule("wrong"), rule("right"), rule("first"), rule("least"), rule("most"), rule("floor")};
        const PassLimits limits{value<int64_t>(rules, "most_tokens"), value<int64_t>(rules, "choices_for_all"),
                                value<int64_t>(rules, "first_decoder")};
        if (limits.most_tokens < 1 || limits.choices_for_all < 0 || limits.choices_for_all > kMostChoices) {
            refuse("rules: expected at least one token, and up to " + std::to_string(kMostChoices) + " choices for all");
        }
        layers_ = std::make_unique<ExpertLayers>(*cache_, std::move(views), size, ahead_eps, learning, paths_, limits, lossy_.get());
    }

    // Begin a pass of a kind: `exact`, or how lossy modes decide in it. foretold: by layer, logits [T, E] of the pass that is
    // computed again.
    void begin_pass(const std::string& kind, const nb::dict& foretold) {
        expect_rest();
        if (kind == "exact") {
            foretold_rows_ = -1;
            layers_->begin_pass(false);
            return;
        }
        if (lossy_ == nullptr) {
            refuse("kind: expected exact, because no lossy mode was given, found " + kind);
        }
        const PassKind named = kind_named(kind);
        if ((named == PassKind::kLittle || named == PassKind::kAgain) && !lossy_->has_little()) {
            refuse("kind: expected one without a little model, found " + kind);
        }
        std::map<int64_t, std::vector<float>> logits;
        int64_t tokens = -1;
        for (auto [layer, rows] : foretold) {
            const Array found(rows, "foretold", Kind::kFloat32, 2);
            const size_t at = checked(cast_or_refuse<int64_t>(layer, "foretold"));
            found.expect({tokens < 0 ? found.size(0) : tokens, experts_of_[at]});
            tokens = found.size(0);
            const float* const values = found.data<const float>();
            logits[static_cast<int64_t>(at)].assign(values, values + found.size(0) * found.size(1));
        }
        foretold_rows_ = tokens;  // only now, so that a refused call changes nothing
        lossy_->begin_pass(named, std::move(logits));
        layers_->begin_pass(true);
    }

    // The decisions since the last call: LossyCounts.
    nb::tuple take_counts() {
        expect_rest();
        if (lossy_ == nullptr) {
            refuse("take_counts: no lossy mode was given");
        }
        const LossyCounts found = std::exchange(lossy_->counts, LossyCounts{});
        return nb::make_tuple(found.ranks, found.missed, found.replaced, found.dropped, found.low, found.skipped, found.foretold,
                              found.foretold_right, found.prompt_experts, found.prompt_missed, found.prompt_low,
                              found.prompt_skipped, found.routings, found.lower_half);
    }

    // Returns how the layer ended; the expert that stopped it; nanoseconds in norm, router and shared expert, in routed
    // experts, and in the shared expert alone; how many experts were chosen; how many of them had been predicted, or -1.
    std::tuple<const char*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> run(int64_t at, nb::handle hidden_object,
                                                                                     int64_t sequences, nb::handle slots_object) {
        const Array hidden(hidden_object, "hidden", Kind::kFloat32, 2, Access::kWrite);
        hidden.expect({hidden.size(0), layers_->size()});
        if (hidden.size(0) < 1) {
            refuse("hidden: expected at least one token");
        }
        if (sequences < 1) {
            refuse("sequences: expected at least 1, found " + std::to_string(sequences));
        }
        const size_t index = checked(at);
        if (foretold_rows_ >= 0) {
            hidden.expect({foretold_rows_, layers_->size()});
        }
        PassRows rows{hidden.data<float>(), hidden.size(0), sequences};
        std::unique_ptr<Array> slots;
        if (!slots_object.is_none()) {
            slots = std::make_unique<Array>(slots_object, "slots", Kind::kInt32, 1);
            slots->expect({hidden.size(0)});
            rows.slots = slots->data<const int32_t>();
        } else if (has_capacity_[index]) {
            refuse("slots: expected one of each token, because experts of the layer have a capacity");
        }
        const Turn turn(*this);
        ExpertLayers::Outcome outcome;
        const auto is_interrupted = [] {
            nb::gil_scoped_acquire locked;
            return PyErr_CheckSignals() != 0;
        };
        {
            nb::gil_scoped_release unlocked;
            outcome = layers_->run(index, rows, is_interrupted);
        }
        if (outcome.end == ExpertLayers::End::kInterrupted) {
            throw nb::python_error();
        }
        expect_memory(outcome.end != ExpertLayers::End::kNoMemory);
        return {kEnds[static_cast<int>(outcome.end)],
                outcome.expert,
                outcome.dense_ns,
                outcome.experts_ns,
                outcome.shared_ns,
                outcome.demanded,
                outcome.predicted};
    }

    // The layers. Raises ValueError while a layer runs, because its results are written then.
    ExpertLayers& operator*() {
        expect_rest();
        return *layers_;
    }

    // True also for a signal handler that runs during a wait. Read and written with the interpreter lock.
    bool is_running() const { return is_running_; }

  private:
    class Turn {
      public:
        explicit Turn(BoundLayers& owner) : owner_(owner) {
            owner_.expect_rest();
            owner_.is_running_ = true;
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        ~Turn() { owner_.is_running_ = false; }

      private:
        BoundLayers& owner_;
    };

    void expect_rest() const {
        if (is_running_) {
            refuse("a layer is being computed: an engine is not for several threads at once");
        }
    }

    static void expect_size(int64_t found, int64_t expected) {
        if (found != expected) {
            refuse("layers: expected a stream of " + std::to_string(expected) + ", found " + std::to_string(found));
        }
    }

    size_t checked(int64_t at) const {
        if (at < 0 || at >= static_cast<int64_t>(layers_->count())) {
            refuse("at: expected a layer below " + std::to_string(layers_->count()) + ", found " + std::to_string(at));
        }
        return static_cast<size_t>(at);
    }

    const MatrixView* matrix(nb::handle object) {
        if (!nb::isinstance<PackedMatrix>(object)) {
            refuse("router: expected a packed matrix");
        }
        held_.append(object);
        return &nb::cast<const PackedMatrix&>(object).view;
    }

    // Returns null for None.
    const float* bias(nb::handle object, int64_t size, const char* name = "router_bias") {
        return object.is_none() ? nullptr : vector(object, size, name);
    }

    // Returns null for None.
    const RoutingRule* rule(nb::handle object, int64_t experts, int64_t top_k) {
        if (object.is_none()) {
            return nullptr;
        }
        const auto& [name, correction, groups, kept_groups, by_best_two, margin, corrects_logits, least_sum] =
            cast_or_refuse<Rule>(object, "rule");
        const bool is_sparsemixer = name == "sparsemixer", is_sigmoid = name == "sigmoid";
        if (!is_sparsemixer && !is_sigmoid && name != "softmax") {
            refuse("rule: expected softmax, sigmoid or sparsemixer, found " + name);
        }
        if (groups < 1 || kept_groups < 1 || kept_groups > groups || experts % groups != 0) {
            refuse("rule: expected groups of equal size, found " + std::to_string(kept_groups) + " of " +
                   std::to_string(groups) + " groups of " + std::to_string(experts) + " experts");
        }
        if (top_k > (is_sparsemixer ? 2 : experts / groups * kept_groups) || (is_sparsemixer && experts < 2)) {
            refuse("rule: expected at most " + std::to_string(is_sparsemixer ? 2 : experts / groups * kept_groups) +
                   " experts of a token, found " + std::to_string(top_k));
        }
        const Scoring scoring = is_sigmoid ? Scoring::kSigmoid : is_sparsemixer ? Scoring::kSparsemixer : Scoring::kSoftmax;
        const float* const added = bias(correction, experts, "correction");
        rules_.push_back(std::make_unique<RoutingRule>(
            RoutingRule{scoring, added, groups, kept_groups, by_best_two, margin, corrects_logits, least_sum}));
        return rules_.back().get();
    }

    const float* vector(nb::handle object, int64_t size, const char* name = "norm") {
        arrays_.push_back(std::make_unique<Array>(object, name, Kind::kFloat32, 1));
        arrays_.back()->expect({size});
        return arrays_.back()->data<const float>();
    }

    void expect_experts(int64_t first, int64_t count) const {
        const int64_t all = lossy_ == nullptr ? cache_->count() : lossy_->high_count();  // low versions follow
        if (first < 0 || count < 0 || count > all || first > all - count) {
            refuse("first_expert: expected experts below " + std::to_string(all) + ", found " + std::to_string(first) +
                   " to " + std::to_string(first + count));
        }
    }

    ExpertLayerView view_of(const nb::dict& fields, int64_t size) {
        ExpertLayerView view{};
        view.norm = vector(field(fields, "experts_norm"), size, "experts_norm");
        const auto norm = [&](const char* name) { return bias(field(fields, name), size, name); };
        view.norm_bias = norm("norm_bias");
        view.after_norm = norm("experts_after_norm");
        view.router_norm = norm("router_norm");
        view.shared_norm = norm("shared_norm");
        view.shared_after_norm = norm("shared_after_norm");
        view.routed_after_norm = norm("routed_after_norm");
        view.norm_eps = value<float>(fields, "norm_eps");
        view.layer = cache_.checked_layer(value<int64_t>(fields, "layer"));
        view.first_expert = value<int64_t>(fields, "first_expert");
        view.top_k = value<int64_t>(fields, "top_k");
        view.routing.renormalizes = value<bool>(fields, "renormalizes");
        view.routing.scale = value<float>(fields, "weight_scale");
        view.residual_scale = value<float>(fields, "residual_scale");
        view.capacity = value<int64_t>(fields, "capacity");
        if (view.capacity < 0) {
            refuse("capacity: expected at least 0, found " + std::to_string(view.capacity));
        }
        has_capacity_.push_back(view.capacity > 0);
        view.stream_scale = value<float>(fields, "stream_scale");
        if (const nb::object router = field(fields, "router"); !router.is_none()) {
            view.router = matrix(router);
            expect_size(view.router->columns, size);
            if (paths_.num_experts > 0 && view.router->rows > paths_.num_experts) {
                refuse("paths: expected as many experts as the largest router has, found " +
                       std::to_string(paths_.num_experts));
            }
            view.router_bias = bias(field(fields, "router_bias"), view.router->rows);
            view.routing.experts = view.router->rows;
            view.routing.rule = rule(field(fields, "rule"), view.router->rows, view.top_k);
            view.routing.expert_scales = bias(field(fields, "expert_scales"), view.router->rows, "expert_scales");
        }
        if (const nb::object shared = field(fields, "shared"); !shared.is_none()) {
            view.shared = expert(shared, size);
        }
        if (const nb::object router = field(fields, "shared_router"); !router.is_none()) {
            view.shared_router = matrix(router);
            expect_size(view.shared_router->columns, size);
            if (view.shared == nullptr || view.shared_router->rows != 1) {
                refuse("shared_router: expected one row and a shared expert, found " +
                       std::to_string(view.shared_router->rows) + " rows");
            }
        }
        const bool is_half = (view.shared_after_norm == nullptr) != (view.routed_after_norm == nullptr);
        if (is_half || (view.shared_after_norm != nullptr && view.shared == nullptr)) {
            refuse("shared_after_norm and routed_after_norm: expected both, and a shared expert, or none");
        }
        take_experts(view, value<nb::list>(fields, "experts"), size);
        take_low_experts(view, value<nb::list>(fields, "low_experts"), size);
        experts_of_.push_back(view.routing.experts);
        for (const Ahead& ahead : value<std::vector<Ahead>>(fields, "ahead")) {
            view.ahead.push_back(ahead_of(ahead, view.layer, size));
        }
        expect_routers_alike(view.ahead);
        return view;
    }

    const ExpertView* expert(nb::handle object, int64_t size) {
        if (!nb::isinstance<Expert>(object)) {
            refuse("experts: expected experts of the extension");
        }
        const ExpertView& view = nb::cast<const Expert&>(object).view;
        expect_size(view.up.columns, size);
        held_.append(object);
        return &view;
    }

    void take_experts(ExpertLayerView& view, const nb::list& experts, int64_t size) {
        const int64_t rows = view.router == nullptr ? 0 : view.router->rows, least = view.router == nullptr ? 0 : 1;
        if (view.top_k < least || view.top_k > rows || static_cast<int64_t>(experts.size()) != rows) {
            refuse("experts: expected " + std::to_string(rows) + ", and " + std::to_string(least) +
                   " to as many of them chosen, found " + std::to_string(experts.size()) + " and " +
                   std::to_string(view.top_k));
        }
        expect_experts(view.first_expert, rows);
        const ExpertView* first = nullptr;
        int64_t kept = 0;
        for (nb::handle object : experts) {
            view.experts.push_back(object.is_none() ? nullptr : expert(object, size));
            view.routing.left_out.push_back(object.is_none());
            const ExpertView* const last = view.experts.back();
            first = first == nullptr ? last : first;
            kept += last != nullptr;
            if (last != nullptr && last->up.rows != first->up.rows) {
                refuse("experts: expected as many features of each");
            }
        }
        if (kept < view.top_k) {
            refuse("experts: expected at least " + std::to_string(view.top_k) + " that are not left out, found " +
                   std::to_string(kept));
        }
        view.routing.has_left_out = kept < rows;
    }

    // Low versions, which only lossy modes compute: one of each expert that has one.
    void take_low_experts(ExpertLayerView& view, const nb::list& experts, int64_t size) {
        const int64_t count = static_cast<int64_t>(experts.size()), rows = view.routing.experts;
        if (count != (lossy_ == nullptr ? 0 : rows)) {
            refuse("low_experts: expected one of each expert under lossy modes, else none, found " + std::to_string(count));
        }
        const auto is_kept = [](const ExpertView* high) { return high != nullptr; };
        const auto first = std::find_if(view.experts.begin(), view.experts.end(), is_kept);
        const int64_t features = first == view.experts.end() ? 0 : (*first)->up.rows;
        for (int64_t at = 0; at < count; ++at) {
            const nb::object object = experts[static_cast<size_t>(at)];
            const ExpertView* const low = object.is_none() ? nullptr : expert(object, size);
            const bool is_there = lossy_->low_index(view.first_expert + at) >= 0;
            if (is_there != (low != nullptr) || (is_there && low->up.rows != features)) {
                refuse("low_experts: expected one for each low version, of as many features as the experts");
            }
            view.experts.push_back(low);
        }
    }

    // LossyModes: thresholds by name, the logical cache or None, and the stored index of each expert's low version or -1.
    std::unique_ptr<LossyChoice> lossy_of(const nb::dict& fields) {
        const auto threshold = [&fields](const char* name) {
            const double found = value<double>(fields, name);
            if (!(found >= 0.0 && found <= 1.0)) {
                refuse(std::string(name) + ": expected a number from 0 to 1");
            }
            return found;
        };
        const LossyRules rules{value<bool>(fields, "has_precision"), value<bool>(fields, "has_routing"),
                               value<bool>(fields, "has_little"),    threshold("low_above"),
                               threshold("skip_above"),              threshold("margin"),
                               threshold("drop"),                    value<int64_t>(fields, "little_experts")};
        auto low = value<std::vector<int64_t>>(fields, "low");
        const int64_t count = static_cast<int64_t>(low.size()), stored = cache_->count();
        std::vector<uint8_t> is_named(static_cast<size_t>(std::max(stored - count, int64_t{0})));
        for (const int64_t index : low) {
            const bool is_low = index >= count && index < stored && is_named[static_cast<size_t>(index - count)]++ == 0;
            if (index != kNoExpert && !is_low) {
                refuse("low: expected different stored low versions, or -1, found " + std::to_string(index));
            }
        }
        if (std::count(is_named.begin(), is_named.end(), 0) != 0 || count > stored) {
            refuse("low: expected every stored low version once");
        }
        const nb::object cache = field(fields, "cache");
        LogicalCache* logical = nullptr;
        if (!cache.is_none()) {
            if (!nb::isinstance<LogicalCache>(cache)) {
                refuse("cache: expected a logical cache of the extension");
            }
            logical = &nb::cast<LogicalCache&>(cache);
            if (logical->count() != stored) {
                refuse("cache: expected one of " + std::to_string(stored) + " experts");
            }
            held_.append(cache);
        }
        if ((rules.has_precision || rules.has_routing) && logical == nullptr) {
            refuse("cache: expected one, because a mode decides by it");
        }
        if (rules.little_experts < 0) {
            refuse("little_experts: expected at least 0");
        }
        return std::make_unique<LossyChoice>(rules, logical, std::move(low));
    }

    static PassKind kind_named(const std::string& name) {
        for (const auto& [known, kind] : {std::pair{"prompt", PassKind::kPrompt}, {"all", PassKind::kAll},
                                          {"little", PassKind::kLittle}, {"again", PassKind::kAgain}}) {
            if (name == known) {
                return kind;
            }
        }
        refuse("kind: expected exact, prompt, all, little or again, found " + name);
    }

    LayerAhead ahead_of(const Ahead& fields, int64_t running, int64_t size) {
        const auto& [rank, layer, first, count, counts, stops_at_miss, router, norm, router_bias, norm_bias, scoring, path,
                     known_experts, known_scores] = fields;
        auto experts = cast_or_refuse<std::vector<int64_t>>(known_experts, "ahead");
        auto scores = cast_or_refuse<std::vector<double>>(known_scores, "ahead");
        LayerAhead ahead{rank,          layer,
                         first,         count,
                         {},            stops_at_miss,
                         {nullptr, nullptr, nullptr}, {path.first, path.second},
                         {experts, scores}};
        const bool has_kinds = lossy_ != nullptr && lossy_->has_little();
        if (counts.size() != (has_kinds ? 3 : 1)) {
            refuse("ahead: expected counts of one kind of passes, or of three with a little model");
        }
        const auto is_count = [this](int64_t found) { return found >= 0 && found <= cache_->count(); };
        for (const auto& [top_k, advised, predicted, advised_each] : counts) {
            if (top_k < 1 || !is_count(top_k) || advised < -1 || predicted < 0 || !is_count(advised_each)) {
                refuse("ahead: expected a top-k of 1 to " + std::to_string(cache_->count()) + ", and numbers of experts");
            }
            ahead.counts.push_back({top_k, advised, predicted, advised_each});
        }
        if (!router.is_none()) {
            const MatrixView* const gate = matrix(router);
            ahead.router = {gate, vector(norm, size), bias(router_bias, gate->rows), bias(norm_bias, size, "norm_bias"),
                            rule(scoring, gate->rows, 1)};
            expect_size(gate->columns, size);
            expect_experts(first, ahead.router.matrix->rows);
        }
        if (path.first >= 0) {
            expect_path(path, running, layer, count);
        }
        if (rank < 1 || layer < 0 || !is_count(count) || experts.size() != scores.size()) {
            refuse("ahead: expected a rank of at least 1, and a score for each expert");
        }
        expect_experts(first, count);
        if (lossy_ != nullptr && layer >= count_) {
            refuse("ahead: expected a layer below " + std::to_string(count_) + ", found " + std::to_string(layer));
        }
        for (const int64_t expert : experts) {
            if (expert < 0 || expert >= count) {
                refuse("known experts: expected some below " + std::to_string(count) + ", found " + std::to_string(expert));
            }
        }
        return ahead;
    }

    // The tables of runtime/bundle/tables.py, whose contents are checked there.
    PathTables paths_of(const nb::dict& fields) {
        const auto take = [this, &fields](const char* name, Kind kind, int rank) -> const Array& {
            arrays_.push_back(std::make_unique<Array>(field(fields, name), name, kind, rank));
            return *arrays_.back();
        };
        const Array& transitions = take("transitions", Kind::kUint32, 3);
        const bool has_sets = !field(fields, "sets").is_none();
        const Array& keys = has_sets ? take("sets", Kind::kUint16, 2) : take("keys", Kind::kInt64, 1);
        const Array& offsets = take("offsets", Kind::kInt64, 1);
        const Array& experts = take("experts", Kind::kUint16, 1);
        const Array& counts = take("counts", Kind::kUint32, 1);
        const int64_t count = transitions.size(1), rows = keys.size(0);
        transitions.expect({count_ - 1, count, count});
        offsets.expect({rows + 1});
        counts.expect({experts.size(0)});
        const int64_t top_k = has_sets ? (keys.size(1) - 1) / 2 : 0;
        if (has_sets) {
            keys.expect({rows, 1 + 2 * top_k});
        }
        return {transitions.data<const uint32_t>(),
                has_sets ? nullptr : keys.data<const int64_t>(),
                has_sets ? keys.data<const uint16_t>() : nullptr,
                offsets.data<const int64_t>(),
                experts.data<const uint16_t>(),
                counts.data<const uint32_t>(),
                rows,
                count,
                top_k,
                value<double>(fields, "least_count")};
    }

    void expect_path(const std::pair<int64_t, int64_t>& path, int64_t running, int64_t layer, int64_t count) const {
        if (paths_.num_experts == 0 || path.first > running || path.first >= layer || layer >= count_ || path.second < -1 ||
            path.second >= path.first || count < 1 || count > paths_.num_experts) {
            refuse("ahead: expected paths, and two layers before the predicted one");
        }
    }

    // Lossy modes route predicted logits by the rules of the later layer.
    void expect_predictions(const std::vector<ExpertLayerView>& views) const {
        for (const ExpertLayerView& view : views) {
            for (const LayerAhead& ahead : view.ahead) {
                const bool is_alike = lossy_ == nullptr ||
                                      (views[static_cast<size_t>(ahead.layer)].routing.experts == ahead.num_experts &&
                                       (ahead.router.matrix == nullptr || ahead.router.matrix->rows == ahead.num_experts));
                const auto fits = [&ahead](const AheadCounts& counts) { return counts.top_k <= ahead.num_experts; };
                if (!is_alike || (lossy_ != nullptr && !std::all_of(ahead.counts.begin(), ahead.counts.end(), fits))) {
                    refuse("ahead: expected the experts of the predicted layer, and at most as many of a token");
                }
            }
        }
    }

    static void expect_routers_alike(const std::vector<LayerAhead>& ahead) {
        int64_t count = 0, rows = 0;
        for (const LayerAhead& each : ahead) {
            if (each.router.matrix != nullptr) {
                rows = count++ == 0 ? each.router.matrix->rows : rows;
                if (each.router.matrix->rows != rows || count > kMaxMatrices) {
                    refuse("ahead: expected at most " + std::to_string(kMaxMatrices) + " routers, of as many experts");
                }
            }
        }
    }

    nb::object reads_;
    BoundCache& cache_;
    nb::list held_;
    int64_t count_ = 0;
    PathTables paths_{};
    std::unique_ptr<LossyChoice> lossy_;
    std::vector<int64_t> experts_of_;  // of each layer
    std::vector<bool> has_capacity_;
    int64_t foretold_rows_ = -1;       // of the pass; -1: nothing was foretold
    std::vector<std::unique_ptr<Array>> arrays_;
    std::vector<std::unique_ptr<RoutingRule>> rules_;
    std::unique_ptr<ExpertLayers> layers_;
    bool is_running_ = false;
};

template <class Float>
nb::bytes bytes_of(const std::vector<Float>& values) {
    return nb::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Float));
}

}  // namespace

void bind_expert_layers(nb::module_& module) {
    using namespace nanobind::literals;
    nb::class_<BoundLayers>(module, "ExpertLayers")
        .def(nb::init<nb::object, nb::list, int64_t, float, const nb::dict&, nb::handle, nb::handle>(), "reads"_a, "layers"_a,
             "size"_a, "ahead_eps"_a, "rules"_a, "paths"_a = nb::none(), "lossy"_a = nb::none())
        .def("run", &BoundLayers::run, "at"_a, "hidden"_a, "sequences"_a = 1, "slots"_a = nb::none())
        .def_prop_ro("is_running", &BoundLayers::is_running)
        .def("begin_pass", &BoundLayers::begin_pass, "kind"_a = "exact", "foretold"_a = nb::dict())
        .def("take_counts", &BoundLayers::take_counts)
        .def("end_pass", [](BoundLayers& layers) { (*layers).end_pass(); })
        .def("forget_guesses", [](BoundLayers& layers) { (*layers).forget_guesses(); })
        .def(
            "threshold",
            [](BoundLayers& layers, int64_t running, int64_t layer) { return (*layers).thresholds().threshold(running, layer); },
            "running"_a, "layer"_a)
        // Results of the layer that ran last.
        .def_prop_ro("chosen", [](BoundLayers& layers) { return (*layers).chosen; })
        .def_prop_ro("advice", [](BoundLayers& layers) { return (*layers).advice; })
        .def_prop_ro("logits", [](BoundLayers& layers) { return bytes_of((*layers).logits); })
        .def_prop_ro("path_shares", [](BoundLayers& layers) { return bytes_of((*layers).path_shares); })
        .def_prop_ro("shares", [](BoundLayers& layers) { return bytes_of((*layers).shares); });
}

}  // namespace moec
