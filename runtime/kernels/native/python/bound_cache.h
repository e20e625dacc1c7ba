// The expert cache as a Python object. It keeps the arrays and experts alive that the cache writes.

#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/bound_weights.h"
#include "experts/expert_cache.h"

namespace moec {

// Arrays of numpy that the cache writes, and experts whose views it moves, kept alive.
struct HeldColumns {
    std::unique_ptr<Array> state, is_leased, is_ahead, is_seen, prefetches, heat, last_used, uses, counts;
    nb::list experts;

    std::unique_ptr<Array> take(nb::dict arrays, const char* name, Kind kind, int rank) {
        if (!arrays.contains(name)) {
            refuse(std::string(name) + ": expected an array");
        }
        return std::make_unique<Array>(arrays[name], name, kind, rank, Access::kWrite);
    }

    Columns columns(nb::dict arrays, int64_t count) {
        for (auto [name, place] :
             {std::pair{"state", &state}, {"is_leased", &is_leased}, {"is_ahead", &is_ahead}, {"is_seen", &is_seen}}) {
            *place = take(arrays, name, Kind::kUint8, 1);
            (*place)->expect({count});
        }
        for (auto [name, place] : {std::pair{"last_used", &last_used}, {"uses", &uses}}) {
            *place = take(arrays, name, Kind::kInt64, 1);
            (*place)->expect({count});
        }
        heat = take(arrays, "heat", Kind::kFloat64, 1);
        heat->expect({count});
        prefetches = take(arrays, "prefetches", Kind::kInt64, 2);
        prefetches->expect({2, count});
        counts = take(arrays, "counts", Kind::kInt64, 1);
        counts->expect({static_cast<int64_t>(sizeof(CacheCounts) / sizeof(int64_t))});
        return {state->data<uint8_t>(),       is_leased->data<uint8_t>(), is_ahead->data<uint8_t>(),   is_seen->data<uint8_t>(),
                prefetches->data<int64_t>(), heat->data<double>(),       last_used->data<int64_t>(), uses->data<int64_t>()};
    }
};

inline Score score_named(const std::string& name) {
    for (const auto& [known, score] : {std::pair{"lrfu", Score::kHeat}, {"lru", Score::kLastUsed}, {"lfu", Score::kUses},
                                       {"edgemoe", Score::kEdgeMoe}, {"hobbit", Score::kHobbit},
                                       {"hobbit-printed", Score::kHobbit}}) {
        if (name == known) {
            return score;
        }
    }
    refuse("policy: expected lrfu, lru, lfu, edgemoe, hobbit or hobbit-printed, found " + name);
}

// What a policy goes by: its name, the weights of HOBBIT's score, and the calibration of each expert.
struct Eviction {
    std::string policy;
    std::vector<double> weights, frequency;
    std::vector<int64_t> high;
    int64_t num_layers, encoder_layers;

    // Add it to the facts, whose experts must fit it.
    void give_to(ResidencyFacts& facts) && {
        const size_t count = facts.sizes.size();
        if (encoder_layers < 0 || encoder_layers >= std::max(num_layers, int64_t{1})) {
            refuse("encoder_layers: expected fewer than all layers, found " + std::to_string(encoder_layers));
        }
        const auto is_layer = [this](int64_t layer) { return layer >= 0 && layer < num_layers; };
        const auto is_expert = [count](int64_t index) { return index >= 0 && index < static_cast<int64_t>(count); };
        if (frequency.size() != count || high.size() != count || weights.size() != 4 ||
            !std::all_of(facts.layer_of.begin(), facts.layer_of.end(), is_layer) ||
            !std::all_of(high.begin(), high.end(), is_expert)) {
            refuse("eviction: expected four weights, and a frequency, a high version and a layer of each expert");
        }
        const auto is_finite = [](double value) { return std::isfinite(value); };
        if (!std::all_of(weights.begin(), weights.end(), is_finite) ||
            !std::all_of(frequency.begin(), frequency.end(), is_finite)) {
            refuse("eviction: expected finite weights and frequencies");
        }
        facts.score = score_named(policy);
        facts.frequency = std::move(frequency);
        facts.high = std::move(high);
        facts.num_layers = num_layers;
        facts.encoder_layers = encoder_layers;
        facts.weights = {weights[0], weights[1], weights[2], weights[3], policy == "hobbit-printed"};
    }
};

// One tuple per expert: descriptor, offset and size in its file, Expert or None, and where gate (-1: none), up and down begin.
inline std::vector<ExpertSource> sources_of(nb::list tuples, nb::list experts) {
    std::vector<ExpertSource> sources;
    for (nb::handle each : tuples) {
        const nb::tuple fields = nb::cast<nb::tuple>(each);
        if (fields.size() != 7) {
            refuse("sources: expected seven fields each");
        }
        ExpertView* view = nullptr;
        if (!fields[3].is_none()) {
            view = &nb::cast<Expert&>(fields[3]).view;
            experts.append(fields[3]);
        }
        sources.push_back({nb::cast<int>(fields[0]), nb::cast<int64_t>(fields[1]), nb::cast<int64_t>(fields[2]), view,
                           nb::cast<int64_t>(fields[4]), nb::cast<int64_t>(fields[5]), nb::cast<int64_t>(fields[6])});
    }
    return sources;
}

// One tuple per expert: address and size of its pages, the number of their watch, and the address of its first byte.
inline std::vector<MappedPages> pages_of(const nb::list& tuples, size_t count, std::vector<uint8_t*>& addresses) {
    std::vector<MappedPages> mapped;
    for (nb::handle each : tuples) {
        const nb::tuple fields = nb::cast<nb::tuple>(each);
        if (fields.size() != 4) {
            refuse("mapped: expected four fields each");
        }
        mapped.push_back({reinterpret_cast<uint8_t*>(nb::cast<uintptr_t>(fields[0])), nb::cast<int64_t>(fields[1]),
                          nb::cast<int64_t>(fields[2])});
        addresses.push_back(reinterpret_cast<uint8_t*>(nb::cast<uintptr_t>(fields[3])));
    }
    if (!mapped.empty() && mapped.size() != count) {
        refuse("mapped: expected none, or one per expert");
    }
    return mapped;
}

class BoundCache {
  public:
    using Indices = Residency::Indices;

    BoundCache(nb::dict arrays, std::vector<int64_t> sizes, std::vector<int64_t> layers, std::vector<int64_t> next_in_file,
               int64_t readers, int64_t max_run_bytes, double half_life, Eviction eviction, int64_t capacity_bytes,
               int64_t pin_limit_bytes, nb::list sources, bool drops_pages, nb::list mapped,
               int64_t most_queued) {
        const int64_t count = static_cast<int64_t>(sizes.size());
        if (layers.size() != sizes.size() || next_in_file.size() != sizes.size() || sources.size() != sizes.size() ||
            readers < 1 || most_queued < 0) {
            refuse("layers, next_in_file, sources: expected one per expert, and at least one reader");
        }
        for (const int64_t next : next_in_file) {
            if (next < -1 || next >= count) {
                refuse("next_in_file: expected experts or -1");
            }
        }
        const Columns columns = held_.columns(arrays, count);
        ResidencyFacts facts{};
        facts.sizes = std::move(sizes);
        facts.layer_of = std::move(layers);
        facts.next_in_file = std::move(next_in_file);
        facts.readers = readers;
        facts.max_run_bytes = max_run_bytes;
        facts.most_queued = most_queued;
        num_layers_ = eviction.num_layers;
        facts.half_life = half_life;
        std::move(eviction).give_to(facts);
        std::vector<uint8_t*> addresses;
        std::vector<MappedPages> pages = pages_of(mapped, facts.sizes.size(), addresses);
        reads_ = std::make_unique<ExpertCache>(std::move(facts), columns, held_.counts->data<CacheCounts>(), capacity_bytes,
                                               pin_limit_bytes, sources_of(sources, held_.experts), drops_pages,
                                               std::move(pages));
        for (size_t index = 0; index < addresses.size(); ++index) {
            reads_->place(static_cast<int64_t>(index), addresses[index]);
        }
    }

    ExpertCache& operator*() { return *reads_; }
    ExpertCache* operator->() { return reads_.get(); }

    const Indices& checked(const Indices& indices) const {
        for (const int64_t index : indices) {
            checked(index);
        }
        return indices;
    }
    int64_t checked(int64_t index) const {
        if (index < 0 || index >= reads_->count()) {
            refuse("expected experts below " + std::to_string(reads_->count()) + ", found " + std::to_string(index));
        }
        return index;
    }

    int64_t checked_layer(int64_t layer) const {
        if (layer < 0 || layer >= num_layers_) {
            refuse("layer: expected one below " + std::to_string(num_layers_) + ", found " + std::to_string(layer));
        }
        return layer;
    }

  private:
    HeldColumns held_;
    int64_t num_layers_ = 0;
    std::unique_ptr<ExpertCache> reads_;
};

}  // namespace moec
