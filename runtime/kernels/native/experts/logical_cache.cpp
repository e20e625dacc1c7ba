// A ledger of experts whose queued reads end at once.

#include "experts/logical_cache.h"

#include <algorithm>
#include <utility>

namespace moec {

OwnColumns::OwnColumns(size_t count, std::vector<double> first_heat)
    : state(count),
      is_leased(count),
      is_ahead(count),
      is_seen(count),
      prefetches(2 * count),
      last_used(count),
      uses(count),
      heat(std::move(first_heat)) {}

Columns OwnColumns::view() {
    return {state.data(),      is_leased.data(), is_ahead.data(), is_seen.data(),
            prefetches.data(), heat.data(),      last_used.data(), uses.data()};
}

LogicalCache::LogicalCache(ResidencyFacts facts, std::vector<double> heat, int64_t capacity, int64_t pin_limit)
    : OwnColumns(facts.sizes.size(), std::move(heat)), Residency(std::move(facts), OwnColumns::view(), &counts, capacity, pin_limit) {}

void LogicalCache::fill(const Indices& indices) {
    const Lock lock(mutex_);
    for (const int64_t index : indices) {
        if (fits_free(index)) {
            begin_warm(index);
            arrive_warm(index);
        }
    }
}

bool LogicalCache::is_resident(int64_t index) const {
    const Lock lock(mutex_);
    return columns_.state[index] == kResident;
}

void LogicalCache::restart_sequence() {
    const Lock lock(mutex_);
    begin_sequence();
}

int64_t LogicalCache::bytes_read() const {
    const Lock lock(mutex_);
    return counts_->bytes_read;
}

void LogicalCache::read_ahead(const Indices& indices) {
    const Lock lock(mutex_);
    advise_and_read(indices);
}

int64_t LogicalCache::serve(int64_t layer, const Indices& experts, const Indices& ahead) {
    const Lock lock(mutex_);
    Indices hits, misses;
    request(layer, experts, hits, misses);
    queue_and_lease(misses);
    end_reads();
    const bool reads_ahead_behind_hits = !hits.empty() && !misses.empty();
    if (!reads_ahead_behind_hits) {
        advise_and_read(ahead);
    }
    release(hits);
    if (reads_ahead_behind_hits) {
        advise_and_read(ahead);
    }
    while (!misses.empty()) {
        queue_and_lease(misses);
        end_reads();
        const auto waits = std::stable_partition(misses.begin(), misses.end(), [this](int64_t index) {
            return columns_.is_leased[index] == 0 || columns_.state[index] != kResident;
        });
        const Indices ready(waits, misses.end());
        misses.erase(waits, misses.end());
        if (ready.empty()) {
            release(misses);
            return misses[0];
        }
        release(ready);
    }
    return -1;
}

void LogicalCache::advise_and_read(const Indices& indices) {
    if (!indices.empty()) {  // without new advice the older advice stays
        advise(indices);
        end_reads();
    }
}

void LogicalCache::end_reads() {
    for (Indices run = next_read(Takes::kAny); !run.empty(); run = next_read(Takes::kAny)) {
        for (const int64_t index : run) {
            arrive(index);
        }
    }
}

void LogicalCache::release(const Indices& indices) {
    for (const int64_t index : indices) {
        if (columns_.is_ahead[index] != 0) {
            count_use_of_advice(index);
        }
        columns_.is_leased[index] = 0;
    }
}

}  // namespace moec
