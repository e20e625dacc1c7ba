// The experts that would be in memory if every read took no time. Lossy modes decide by it, not by the cache of the run, whose
// state depends on when reads end. The specification is runtime/modes/logical_cache.py.

#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "experts/residency.h"

namespace moec {

// The arrays that a Residency writes.
struct OwnColumns {
    OwnColumns(size_t count, std::vector<double> heat);
    Columns view();

    std::vector<uint8_t> state, is_leased, is_ahead, is_seen;
    std::vector<int64_t> prefetches, last_used, uses;
    std::vector<double> heat;
    CacheCounts counts{};
};

class LogicalCache : private OwnColumns, public Residency {
  public:
    // heat: of each expert at the start.
    LogicalCache(ResidencyFacts facts, std::vector<double> heat, int64_t capacity_bytes, int64_t pin_limit_bytes);

    // Fill free capacity in this order. Evicts nothing.
    void fill(const Indices& indices);
    bool is_resident(int64_t index) const;
    // Request experts for one layer of one pass, then read ahead. Returns an expert that does not fit, or -1.
    int64_t serve(int64_t layer, const Indices& experts, const Indices& ahead);
    void read_ahead(const Indices& indices);
    void restart_sequence();
    int64_t num_layers() const { return facts_.num_layers; }
    int64_t bytes_read() const;

  private:
    using Lock = std::lock_guard<std::mutex>;

    void advise_and_read(const Indices& indices);
    void end_reads();
    void release(const Indices& indices);

    mutable std::mutex mutex_;  // a layer runs without the lock of the interpreter
};

}  // namespace moec
