// Bindings of the expert cache and of mapped files. Types and meanings: runtime/kernels/_native.pyi.

#include "python/bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>
#include <vector>

#include "python/arguments.h"
#include "python/bound_cache.h"
#include "experts/logical_cache.h"
#include "experts/mapped_faults.h"

namespace moec {
namespace {

using Indices = Residency::Indices;

std::pair<Indices, Indices> bind_request(BoundCache& reads, int64_t layer, const Indices& experts) {
    std::pair<Indices, Indices> found;
    reads->request(reads.checked_layer(layer), reads.checked(experts), found.first, found.second);
    return found;
}

nb::object bind_request_and_queue(BoundCache& reads, int64_t layer, const Indices& experts) {
    std::pair<Indices, Indices> found;
    const bool is_open =
        reads->request_and_queue(reads.checked_layer(layer), reads.checked(experts), found.first, found.second);
    return is_open ? nb::cast(std::move(found)) : nb::none();
}

std::pair<const char*, Indices> bind_wait(BoundCache& reads, const Indices& remaining, bool together) {
    reads.checked(remaining);
    Indices found;
    ExpertCache::Wait state;
    {
        nb::gil_scoped_release unlocked;
        state = reads->wait(remaining, together, found);
    }
    static const char* const names[] = {"ready", "again", "failed", "too large", "closed"};
    return {names[static_cast<int>(state)], std::move(found)};
}

Takes takes_named(const std::string& name) {
    if (name != "any" && name != "demand" && name != "advice") {
        refuse("takes: expected any, demand or advice, found " + name);
    }
    return name == "any" ? Takes::kAny : name == "demand" ? Takes::kDemand : Takes::kAdvice;
}

// load(run) and check(run, addresses) return the experts that failed. They must not raise.
void bind_serve(BoundCache& reads, nb::callable load, nb::object check, const std::string& takes) {
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
    const ExpertCache::Check checking = check.is_none() ? ExpertCache::Check() : check_in_python;
    const Takes taken = takes_named(takes);
    nb::gil_scoped_release unlocked;
    reads->serve(load_in_python, checking, taken);
}

std::pair<std::vector<std::pair<int64_t, int64_t>>, Indices> bind_take_places(BoundCache& reads) {
    std::pair<std::vector<std::pair<int64_t, int64_t>>, Indices> found;
    reads->take_places(found.first, found.second);
    return found;
}

bool bind_wait_warmed(BoundCache& reads) {
    nb::gil_scoped_release unlocked;
    return reads->wait_warmed();
}

bool bind_resize(BoundCache& reads, int64_t capacity_bytes, int64_t pin_limit_bytes) {
    nb::gil_scoped_release unlocked;
    return reads->resize(capacity_bytes, pin_limit_bytes);
}

void bind_place(BoundCache& reads, int64_t index, int64_t address) {
    reads->place(reads.checked(index), reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(address)));
}

int64_t bind_first_changed(nb::handle files) {
    static_assert(sizeof(MappedFileState) == 5 * sizeof(int64_t));
    const Array states(files, "files", Kind::kInt64, 2);
    states.expect({states.size(0), 5});
    return first_changed(states.data<const MappedFileState>(), states.size(0));
}

// A logical cache; its sizes, layers and heat are of each expert.
void make_logical(LogicalCache* self, std::vector<int64_t> sizes, std::vector<int64_t> layers, std::vector<double> heat,
                  double half_life, Eviction eviction, int64_t capacity_bytes, int64_t pin_limit_bytes, int64_t max_run_bytes) {
    if (layers.size() != sizes.size() || heat.size() != sizes.size()) {
        refuse("layers, heat: expected one per expert");
    }
    ResidencyFacts facts{};
    facts.next_in_file.assign(sizes.size(), -1);
    facts.sizes = std::move(sizes);
    facts.layer_of = std::move(layers);
    facts.readers = 1;
    facts.max_run_bytes = max_run_bytes;
    facts.half_life = half_life;
    std::move(eviction).give_to(facts);
    new (self) LogicalCache(std::move(facts), std::move(heat), capacity_bytes, pin_limit_bytes);
}

const Indices& checked_of(const LogicalCache& cache, const Indices& indices) {
    for (const int64_t index : indices) {
        if (index < 0 || index >= cache.count()) {
            refuse("expected experts below " + std::to_string(cache.count()) + ", found " + std::to_string(index));
        }
    }
    return indices;
}

int64_t bind_serve_logical(LogicalCache& cache, int64_t layer, const Indices& experts, const Indices& ahead) {
    if (layer < 0 || layer >= cache.num_layers()) {
        refuse("layer: expected one below " + std::to_string(cache.num_layers()) + ", found " + std::to_string(layer));
    }
    return cache.serve(layer, checked_of(cache, experts), checked_of(cache, ahead));
}

Indices list_of(const std::deque<int64_t>& queue) {
    return Indices(queue.begin(), queue.end());
}

}  // namespace

void bind_cache(nb::module_& module) {
    using namespace nanobind::literals;
    module.def("watch_mapping", watch_mapping, "address"_a, "size_bytes"_a);
    module.def("has_faulted", has_faulted, "watch"_a);
    module.def("first_changed", bind_first_changed, "files"_a);
    module.def("forget_mapping", forget_mapping, "watch"_a);
    nb::class_<Eviction>(module, "Eviction")
        .def(
            "__init__",
            [](Eviction* self, std::string policy, std::vector<double> weights, std::vector<double> frequency,
               std::vector<int64_t> high, int64_t num_layers, int64_t encoder_layers) {
                new (self) Eviction{std::move(policy), std::move(weights), std::move(frequency),
                                    std::move(high),   num_layers,         encoder_layers};
            },
            "policy"_a, "weights"_a, "frequency"_a, "high"_a, "num_layers"_a, "encoder_layers"_a = 0);
    nb::class_<LogicalCache>(module, "LogicalCache")
        .def("__init__", make_logical, "sizes"_a, "layers"_a, "heat"_a, "half_life"_a, "eviction"_a, "capacity_bytes"_a,
             "pin_limit_bytes"_a, "max_run_bytes"_a)
        .def("fill", [](LogicalCache& cache, const Indices& indices) { cache.fill(checked_of(cache, indices)); }, "indices"_a)
        .def(
            "is_resident",
            [](const LogicalCache& cache, int64_t index) { return cache.is_resident(checked_of(cache, {index})[0]); }, "index"_a)
        .def("serve", bind_serve_logical, "layer"_a, "experts"_a, "ahead"_a)
        .def(
            "read_ahead", [](LogicalCache& cache, const Indices& indices) { cache.read_ahead(checked_of(cache, indices)); },
            "indices"_a)
        .def("begin_sequence", [](LogicalCache& cache) { cache.restart_sequence(); })
        .def_prop_ro("bytes_read", &LogicalCache::bytes_read);
    nb::class_<BoundCache>(module, "ExpertCache")
        .def(nb::init<nb::dict, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, int64_t, int64_t, double,
                      Eviction, int64_t, int64_t, nb::list, bool, nb::list, int64_t>(),
             "arrays"_a, "sizes"_a, "layers"_a, "next_in_file"_a, "readers"_a, "max_run_bytes"_a, "half_life"_a, "eviction"_a,
             "capacity_bytes"_a, "pin_limit_bytes"_a, "sources"_a, "drops_pages"_a, "mapped"_a = nb::list(), "most_queued"_a = 0)
        .def_prop_ro("capacity_bytes", [](BoundCache& reads) { return reads->ledger().capacity_bytes; })
        .def_prop_ro("pin_limit_bytes", [](BoundCache& reads) { return reads->ledger().pin_limit_bytes; })
        .def_prop_ro("used_bytes", [](BoundCache& reads) { return reads->ledger().used_bytes; })
        // The queues of the decisions below. Do not read them while readers run.
        .def_prop_ro("demand", [](BoundCache& reads) { return list_of(reads->demand); })
        .def_prop_ro("advice", [](BoundCache& reads) { return list_of(reads->advice); })
        // Single decisions, without a lock: for one thread.
        .def("request", bind_request, "layer"_a, "experts"_a)
        .def(
            "queue_and_lease",
            [](BoundCache& reads, const Indices& waiting) { reads->queue_and_lease(reads.checked(waiting)); }, "waiting"_a)
        .def("advise", [](BoundCache& reads, const Indices& indices) { reads->advise(reads.checked(indices)); }, "indices"_a)
        .def(
            "next_read", [](BoundCache& reads, const std::string& takes) { return reads->next_read(takes_named(takes)); },
            "takes"_a = "any")
        .def("arrive", [](BoundCache& reads, int64_t index) { reads->arrive(reads.checked(index)); }, "index"_a)
        .def("fail_read", [](BoundCache& reads, int64_t index) { reads->fail_read(reads.checked(index)); }, "index"_a)
        // The cache, with its lock.
        .def("request_and_queue", bind_request_and_queue, "layer"_a, "experts"_a)
        .def("wait", bind_wait, "remaining"_a, "together"_a)
        .def("unlease", [](BoundCache& reads, const Indices& indices) { reads->unlease(reads.checked(indices)); }, "indices"_a)
        .def("begin_sequence", [](BoundCache& reads) { reads->restart_sequence(); })
        .def(
            "prefetch", [](BoundCache& reads, const Indices& indices) { reads->prefetch(reads.checked(indices)); }, "indices"_a)
        .def("warm", [](BoundCache& reads, const Indices& indices) { reads->warm(reads.checked(indices)); }, "indices"_a)
        .def("wait_warmed", bind_wait_warmed)
        .def("resize", bind_resize, "capacity_bytes"_a, "pin_limit_bytes"_a)
        .def("has_work", [](BoundCache& reads) { return reads->has_work(); })
        .def("audit", [](BoundCache& reads) { return reads->audit(); })
        .def("take_places", bind_take_places)
        .def("place", bind_place, "index"_a, "address"_a)
        .def("serve", bind_serve, "load"_a, "check"_a.none(), "takes"_a = "any")
        .def("close", [](BoundCache& reads) { reads->close(); });
}

}  // namespace moec
