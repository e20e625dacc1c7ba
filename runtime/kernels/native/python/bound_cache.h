// The expert cache as a Python object. It keeps the arrays and experts alive that the cache writes.

#pragma once

#include <nanobind/nanobind.h>

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
    if (name == "lrfu") {
        return Score::kHeat;
    }
    if (name != "lru" && name != "lfu") {
        refuse("policy: expected lrfu, lru or lfu, found " + name);
    }
    return name == "lru" ? Score::kLastUsed : Score::kUses;
}

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

class BoundCache {
  public:
    using Indices = Residency::Indices;

    BoundCache(nb::dict arrays, std::vector<int64_t> sizes, std::vector<int64_t> layers, std::vector<int64_t> next_in_file,
               int64_t readers, int64_t max_run_bytes, double half_life, const std::string& policy, int64_t capacity_bytes,
               int64_t pin_limit_bytes, nb::list sources, bool drops_pages) {
        const int64_t count = static_cast<int64_t>(sizes.size());
        if (layers.size() != sizes.size() || next_in_file.size() != sizes.size() || sources.size() != sizes.size() ||
            readers < 1) {
            refuse("layers, next_in_file, sources: expected one per expert, and at least one reader");
        }
        for (const int64_t next : next_in_file) {
            if (next < -1 || next >= count) {
                refuse("next_in_file: expected experts or -1");
            }
        }
        const Columns columns = held_.columns(arrays, count);
        ResidencyFacts facts{std::move(sizes), std::move(layers), std::move(next_in_file), readers,
                             max_run_bytes,    half_life,         score_named(policy)};
        reads_ = std::make_unique<ExpertCache>(std::move(facts), columns, held_.counts->data<CacheCounts>(), capacity_bytes,
                                               pin_limit_bytes, sources_of(sources, held_.experts), drops_pages);
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

  private:
    HeldColumns held_;
    std::unique_ptr<ExpertCache> reads_;
};

}  // namespace moec
