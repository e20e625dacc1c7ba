// The Python face of the expert cache. Types and meanings: runtime/kernels/_native.pyi.

#include "cache_bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bound_weights.h"
#include "expert_reads.h"

namespace moec {
namespace {

using Indices = Residency::Indices;
constexpr int64_t kCounts = sizeof(CacheCounts) / sizeof(int64_t);

// Arrays that numpy owns and the cache writes, and the experts whose views it moves, kept alive.
struct Held {
    std::unique_ptr<Array> state, is_leased, is_ahead, is_seen, prefetches, heat, last_used, uses, counts;
    nb::list experts;

    std::unique_ptr<Array> take(nb::dict arrays, const char* name, Kind kind, int rank) {
        if (!arrays.contains(name)) {
            refuse(std::string(name) + ": expected an array");
        }
        return std::make_unique<Array>(arrays[name], name, kind, rank, Access::kWrite);
    }

    Columns columns(nb::dict arrays, int64_t count) {
        for (auto [name, place] : {std::pair{"state", &state}, {"is_leased", &is_leased}, {"is_ahead", &is_ahead}, {"is_seen", &is_seen}}) {
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
        counts->expect({kCounts});
        return {state->data<uint8_t>(),       is_leased->data<uint8_t>(), is_ahead->data<uint8_t>(),   is_seen->data<uint8_t>(),
                prefetches->data<int64_t>(), heat->data<double>(),       last_used->data<int64_t>(), uses->data<int64_t>()};
    }
};

Score score_named(const std::string& name) {
    if (name == "lrfu") {
        return Score::kHeat;
    }
    if (name != "lru" && name != "lfu") {
        refuse("policy: expected lrfu, lru or lfu, found " + name);
    }
    return name == "lru" ? Score::kLastUsed : Score::kUses;
}

// A tuple per expert: descriptor, offset and size in its file, the expert or None, where gate (-1: none), up and down begin.
std::vector<ExpertSource> sources_of(nb::list tuples, nb::list experts) {
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

class BoundReads {
  public:
    BoundReads(nb::dict arrays, std::vector<int64_t> sizes, std::vector<int64_t> layers, std::vector<int64_t> following, int64_t readers,
               int64_t max_run_bytes, double half_life, const std::string& policy, int64_t capacity_bytes, int64_t pin_limit_bytes,
               nb::list sources, bool drops_pages) {
        const int64_t count = static_cast<int64_t>(sizes.size());
        if (layers.size() != sizes.size() || following.size() != sizes.size() || sources.size() != sizes.size() || readers < 1) {
            refuse("layers, following, sources: expected one per expert, and at least one reader");
        }
        for (const int64_t behind : following) {
            if (behind < -1 || behind >= count) {
                refuse("following: expected experts or -1");
            }
        }
        const Columns columns = held_.columns(arrays, count);
        ResidencyFacts facts{std::move(sizes), std::move(layers), std::move(following), readers, max_run_bytes, half_life, score_named(policy)};
        reads_ = std::make_unique<ExpertReads>(std::move(facts), columns, held_.counts->data<CacheCounts>(), capacity_bytes, pin_limit_bytes,
                                               sources_of(sources, held_.experts), drops_pages);
    }

    ExpertReads& operator*() { return *reads_; }
    ExpertReads* operator->() { return reads_.get(); }

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
    Held held_;
    std::unique_ptr<ExpertReads> reads_;
};

std::pair<Indices, Indices> bind_ask(BoundReads& reads, int64_t layer, const Indices& experts) {
    std::pair<Indices, Indices> found;
    reads->ask(layer, reads.checked(experts), found.first, found.second);
    return found;
}

nb::object bind_begin(BoundReads& reads, int64_t layer, const Indices& experts) {
    std::pair<Indices, Indices> found;
    const bool is_open = reads->begin(layer, reads.checked(experts), found.first, found.second);
    return is_open ? nb::cast(std::move(found)) : nb::none();
}

std::pair<const char*, Indices> bind_wait(BoundReads& reads, const Indices& remaining, bool together) {
    reads.checked(remaining);
    Indices found;
    ExpertReads::Wait state;
    {
        nb::gil_scoped_release unlocked;
        state = reads->wait(remaining, together, found);
    }
    static const char* const names[] = {"ready", "again", "failed", "too large", "closed"};
    return {names[static_cast<int>(state)], std::move(found)};
}

// load(run), check(run, addresses): which failed. They raise nothing.
void bind_serve(BoundReads& reads, nb::callable load, nb::object check) {
    const auto load_in_python = [&load](const Indices& run) {
        nb::gil_scoped_acquire locked;
        return nb::cast<Indices>(load(run));
    };
    const auto check_in_python = [&check](const Indices& run, const std::vector<uint8_t*>& addresses) {
        nb::gil_scoped_acquire locked;
        std::vector<uintptr_t> numbers;
        for (uint8_t* const address : addresses) {
            numbers.push_back(reinterpret_cast<uintptr_t>(address));
        }
        return nb::cast<Indices>(check(run, numbers));
    };
    const ExpertReads::Check checking = check.is_none() ? ExpertReads::Check() : check_in_python;
    nb::gil_scoped_release unlocked;
    reads->serve(load_in_python, checking);
}

std::pair<std::vector<std::pair<int64_t, int64_t>>, Indices> bind_take_places(BoundReads& reads) {
    std::pair<std::vector<std::pair<int64_t, int64_t>>, Indices> found;
    reads->take_places(found.first, found.second);
    return found;
}

bool bind_wait_warmed(BoundReads& reads) {
    nb::gil_scoped_release unlocked;
    return reads->wait_warmed();
}

bool bind_resize(BoundReads& reads, int64_t capacity_bytes, int64_t pin_limit_bytes) {
    nb::gil_scoped_release unlocked;
    return reads->resize(capacity_bytes, pin_limit_bytes);
}

void bind_place(BoundReads& reads, int64_t index, int64_t address) {
    reads->place(reads.checked(index), reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(address)));
}

Indices list_of(const std::deque<int64_t>& queue) {
    return Indices(queue.begin(), queue.end());
}

}  // namespace

void bind_cache(nb::module_& module) {
    using namespace nanobind::literals;
    nb::class_<BoundReads>(module, "ExpertReads")
        .def(nb::init<nb::dict, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, int64_t, int64_t, double, const std::string&,
                      int64_t, int64_t, nb::list, bool>(),
             "arrays"_a, "sizes"_a, "layers"_a, "following"_a, "readers"_a, "max_run_bytes"_a, "half_life"_a, "policy"_a, "capacity_bytes"_a,
             "pin_limit_bytes"_a, "sources"_a, "drops_pages"_a)
        .def_prop_ro("capacity_bytes", [](BoundReads& reads) { return reads->ledger().capacity_bytes; })
        .def_prop_ro("pin_limit_bytes", [](BoundReads& reads) { return reads->ledger().pin_limit_bytes; })
        .def_prop_ro("used_bytes", [](BoundReads& reads) { return reads->ledger().used_bytes; })
        // Of the decisions below; not while readers run.
        .def_prop_ro("demand", [](BoundReads& reads) { return list_of(reads->demand); })
        .def_prop_ro("advice", [](BoundReads& reads) { return list_of(reads->advice); })
        // Decisions, one by one and without a lock: for one thread.
        .def("ask", bind_ask, "layer"_a, "experts"_a)
        .def("issue", [](BoundReads& reads, const Indices& waiting) { reads->issue(reads.checked(waiting)); }, "waiting"_a)
        .def("advise", [](BoundReads& reads, const Indices& indices) { reads->advise(reads.checked(indices)); }, "indices"_a)
        .def("next_read", [](BoundReads& reads) { return reads->next_read(); })
        .def("arrive", [](BoundReads& reads, int64_t index) { reads->arrive(reads.checked(index)); }, "index"_a)
        .def("withdraw", [](BoundReads& reads, int64_t index) { reads->withdraw(reads.checked(index)); }, "index"_a)
        // The cache.
        .def("begin", bind_begin, "layer"_a, "experts"_a)
        .def("wait", bind_wait, "remaining"_a, "together"_a)
        .def("unlease", [](BoundReads& reads, const Indices& indices) { reads->unlease(reads.checked(indices)); }, "indices"_a)
        .def("prefetch", [](BoundReads& reads, const Indices& indices) { reads->prefetch(reads.checked(indices)); }, "indices"_a)
        .def("warm", [](BoundReads& reads, const Indices& indices) { reads->warm(reads.checked(indices)); }, "indices"_a)
        .def("wait_warmed", bind_wait_warmed)
        .def("resize", bind_resize, "capacity_bytes"_a, "pin_limit_bytes"_a)
        .def("has_work", [](BoundReads& reads) { return reads->has_work(); })
        .def("audit", [](BoundReads& reads) { return reads->audit(); })
        .def("take_places", bind_take_places)
        .def("place", bind_place, "index"_a, "address"_a)
        .def("serve", bind_serve, "load"_a, "check"_a.none())
        .def("close", [](BoundReads& reads) { reads->close(); });
}

}  // namespace moec
