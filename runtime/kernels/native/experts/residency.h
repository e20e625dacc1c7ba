// State of each of N experts (absent, queued, loading, resident), queues of reads, and eviction. One class in two files:
// residency.cpp and eviction.cpp. Their specifications are residency.py and eviction.py in runtime/expert_cache/.
// tests/runtime/expert_cache/test_native_residency.py compares them call by call.
// It has no storage, threads or time: the owner (expert_cache.h) begins reads, reports their end, and holds a lock if several
// threads call.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace moec {

template <class Container>
bool contains(const Container& values, int64_t value) {
    return std::find(values.begin(), values.end(), value) != values.end();
}

// The queues that a reader takes from: demand before advice, demand alone, advice alone.
enum class Takes { kAny, kDemand, kAdvice };

enum State : uint8_t { kAbsent, kQueued, kLoading, kResident };
// The score by which experts are kept. The lowest is evicted first, then the least recently used, then the lowest index.
enum class Score { kHeat, kLastUsed, kUses, kEdgeMoe, kHobbit };
// Weights of kHobbit. layers_back: 1 for the distances as printed in the paper, which are those of the layer before; else 0.
struct HobbitWeights {
    double lru, lfu, lhu, fld;
    int64_t layers_back;
};

// Arrays per expert, [N] each, shared with Python. prefetches: [2, N], counts of prefetch reads, and of those used in time.
struct Columns {
    uint8_t* state;
    uint8_t* is_leased;
    uint8_t* is_ahead;
    uint8_t* is_seen;
    int64_t* prefetches;
    double* heat;
    int64_t* last_used;
    int64_t* uses;
};

// The fields of runtime/expert_cache/cache_stats.py, in the same order.
struct CacheCounts {
    int64_t lookups, hits, misses, late_hits, evictions, reads, rereads, bytes_read, stall_ns, prefetch_reads, prefetch_used,
        prefetch_hits, warm_reads, busy_ns;
};

struct ResidencyFacts {
    std::vector<int64_t> sizes;      // bytes; 0: left out of the model, always resident
    std::vector<int64_t> layer_of;
    std::vector<int64_t> next_in_file;  // the expert whose bytes follow in the file, or -1
    int64_t readers, max_run_bytes;
    int64_t most_queued;             // reads ahead that are queued at once; 0: all. Each evicts when it is queued
    double half_life;                // in requests of a layer
    Score score;
    std::vector<double> frequency;   // share of its layer's tokens that chose each expert in calibration
    std::vector<int64_t> high;       // the high version of each expert, often itself
    int64_t num_layers, encoder_layers;  // the first layers are those of an encoder
    HobbitWeights weights;
};

class Residency {
  public:
    using Indices = std::vector<int64_t>;

    Residency(ResidencyFacts facts, Columns columns, CacheCounts* counts, int64_t capacity_bytes, int64_t pin_limit_bytes);
    virtual ~Residency() = default;

    int64_t count() const { return static_cast<int64_t>(facts_.sizes.size()); }
    int64_t size(int64_t index) const { return facts_.sizes[static_cast<size_t>(index)]; }

    // Restart the counts of passes and uses of a sequence.
    void begin_sequence();
    // Request experts for one layer of one pass. hits: resident, leased now. misses: the others.
    void request(int64_t layer, const Indices& experts, Indices& hits, Indices& misses);
    // Queue the reads of the waiting experts that fit now, and lease these experts.
    void queue_and_lease(const Indices& waiting);
    // Queue reads ahead, likeliest first, as far as free memory and the pin limit allow. Replaces older advice.
    void advise(const Indices& indices);
    void drop_advice();
    Indices next_read(Takes takes);
    void arrive(int64_t index);
    bool fits_free(int64_t index) const;
    void begin_warm(int64_t index);
    void arrive_warm(int64_t index);
    // End a read that failed. The expert is absent again, and a lease on it stays.
    void fail_read(int64_t index);
    void count_use_of_advice(int64_t index);
    // Evicts until the bytes fit into the capacity. Returns false if leases or reads prevent that.
    bool shrink();

    int64_t capacity_bytes, pin_limit_bytes, used_bytes = 0;
    std::deque<int64_t> demand, advice;  // queued reads, most urgent first

  protected:
    // Called for every expert that gives up its bytes.
    virtual void left(int64_t) {}

    ResidencyFacts facts_;
    Columns columns_;
    CacheCounts* counts_;

  private:
    // The experts that may be evicted, in order. Made when first needed, once for all reads that start together.
    struct Victims {
        explicit Victims(bool spares) : spares_pins(spares) {}
        bool spares_pins, is_made = false;
        std::vector<int64_t> order, pins;  // pins: least likely prediction first
        size_t next = 0, sorted = 0, next_pin = 0;
    };

    int64_t layer_of(int64_t index) const { return facts_.layer_of[static_cast<size_t>(index)]; }
    bool is_evictable(int64_t index) const { return columns_.state[index] == kResident && !columns_.is_leased[index]; }
    double score(int64_t index) const;
    double hobbit_score(int64_t index) const;
    int64_t decoder_layers() const { return facts_.num_layers - facts_.encoder_layers; }
    int64_t distance(int64_t layer, int64_t running) const;
    int eviction_group(int64_t index) const;
    bool fits_pass(const Indices& experts) const;
    int64_t run_bytes(int64_t index) const { return std::min(size(index), facts_.max_run_bytes); }
    bool keeps_busy(int64_t on_the_way_bytes) const;
    bool waits_for_demand() const;
    bool queue_demand(const Indices& waiting);
    bool goes_before(int64_t one, int64_t other) const;
    void use(const Indices& experts);
    void become_resident(int64_t index);
    void make_absent(int64_t index);
    void reserve(int64_t index);
    void queue_advice();
    // Eviction, in eviction.cpp.
    void evict(int64_t index);
    void make(Victims& victims);
    int64_t next_victim(Victims& victims);  // -1: none
    bool make_room(int64_t need_bytes, Victims& victims, bool is_demand);
    Indices take(std::deque<int64_t>& queue);
    Indices within_pin_limit(const Indices& indices) const;

    std::vector<int64_t> previous_in_file_;  // the expert whose bytes come before, or -1
    Indices pins_;
    std::deque<int64_t> backlog_;    // advised experts that are not queued yet, most urgent first
    int64_t clock_ = 0, layer_ = 0;  // requests so far, and the layer of the last one
    bool fits_pass_ = true;          // whether the cache holds a pass whose layers all need as much as the last request
    bool has_unqueued_ = false;      // whether the running layer waits for experts whose reads are not queued yet
    std::vector<double> log2_distance_;  // by distance, from 0, which does not occur
    int64_t sequence_start_ = 0;     // clock when the sequence began
    Indices uses_before_, uses_of_any_version_;  // before the sequence, and within it by high version
    std::vector<double> scores_;     // of the experts that may be evicted now
};

}  // namespace moec
