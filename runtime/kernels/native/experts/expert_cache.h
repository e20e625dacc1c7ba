// The expert cache of the default path, in C++ what runtime/expert_cache/python_cache.py is in Python. Reader threads read the
// experts that Residency queues, and callers wait for them. A place is the memory of one expert; a read goes into the place of
// an evicted expert of the same size. With mapped files (`--io mmap`) an expert is always at the same address; a read brings
// its pages into memory. Which expert is evicted is decided in eviction.cpp.
//
// Functions of callers: expert_cache.cpp. Functions of reader threads: reader_threads.cpp.
//
// Python does three things: it provides a place where none of the right size is free, it handles failed reads, and it compares
// checksums at the first read of an expert and after its file has changed (specification: runtime/storage/read_verifier.py).
// Everything else is a system call or two and one fstat between two short holds of a lock.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "experts/mapped_faults.h"
#include "operations/operations.h"
#include "experts/residency.h"

namespace moec {

// The clock of all measured times.
inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Where the bytes of one expert are in its file, and where its matrices begin within them. gate_bytes -1: no gate.
struct ExpertSource {
    int descriptor;
    int64_t offset_bytes, size_bytes;
    ExpertView* view;  // null: the expert is left out of the model
    int64_t gate_bytes, up_bytes, down_bytes;
};

// The pages of one expert in a mapped file, and the number of the file's mapping in mapped_faults.h.
struct MappedPages {
    uint8_t* start;
    int64_t size_bytes, watch;
};

class ExpertCache : public Residency {
  public:
    enum class Wait { kReady, kAgain, kFailed, kTooLarge, kClosed };
    // Load reads a run by other means; Check compares a run with its checksums. Both return the experts that failed. They are
    // called without the lock.
    using Load = std::function<Indices(const Indices&)>;
    using Check = std::function<Indices(const Indices&, const std::vector<uint8_t*>& addresses)>;

    // mapped: pages of each expert if the files are mapped; empty if experts are read into places.
    ExpertCache(ResidencyFacts facts, Columns columns, CacheCounts* counts, int64_t capacity_bytes, int64_t pin_limit_bytes,
                std::vector<ExpertSource> sources, bool drops_pages, std::vector<MappedPages> mapped);

    // The loop of a reader thread, until `close`. Without a check nothing is compared. Experts to warm count as demand.
    void serve(const Load& load, const Check& check, Takes takes);
    void close();

    // Request the experts of a layer. hits: resident, now leased. misses: as many as fit now are queued and leased.
    bool request_and_queue(int64_t layer, const Indices& experts, Indices& hits, Indices& misses);
    // Queue more reads of the remaining experts, if there were too many before.
    void queue_more(const Indices& remaining);
    // Wait for some of the remaining experts.
    // found: all that are resident, or one if not `together`; for kFailed, one that cannot be read.
    // Returns kAgain after a short time, so that the caller can look at signals.
    Wait wait(const Indices& remaining, bool together, Indices& found);
    void unlease(const Indices& indices);
    void restart_sequence();
    void prefetch(const Indices& indices);
    void warm(const Indices& indices);
    // Returns true when all experts to warm are read. Waits a short time at most.
    bool wait_warmed();
    // Returns false while running reads keep the cache too large. Waits a short time at most.
    bool resize(int64_t capacity_bytes, int64_t pin_limit_bytes);
    // Changes since the last call. moved: {old, new} experts of a place. spare: experts whose places are free, or whose mapped
    // pages can be dropped.
    void take_places(std::vector<std::pair<int64_t, int64_t>>& moved, Indices& spare);
    // Python has read this expert to this address and checked it.
    void place(int64_t index, uint8_t* address);
    bool has_work();
    // Whether an expert is in memory or being read.
    bool is_held(int64_t index);
    struct Ledger {
        int64_t capacity_bytes, pin_limit_bytes, used_bytes;
    };
    Ledger ledger();
    // Used bytes as counted, and as the sum over all states. They differ only after a fault.
    std::pair<int64_t, int64_t> audit();

  protected:
    void left(int64_t index) override;

  private:
    using Lock = std::unique_lock<std::mutex>;

    // A file with experts. state: number of the identities that it has had, from 1 on.
    struct SourceFile {
        int descriptor;
        FileIdentity identity;
        uint32_t state;
    };

    bool is_verified(const Indices& run, uint32_t state) const;
    void note_verified(const Indices& run, const Indices& failed, const SourceFile& before, const FileIdentity& after);
    SourceFile& file_of(const Indices& run) { return files_[file_of_[static_cast<size_t>(run[0])]]; }
    Indices next_run(Lock& lock, bool& is_warm, Takes takes);
    bool give_places(const Indices& run);
    void rebind(int64_t index);
    bool read(const Indices& run, const std::vector<uint8_t*>& addresses) const;
    bool read_into_places(const Indices& run, const std::vector<uint8_t*>& addresses) const;
    bool read_pages(int64_t index) const;
    void drop_pages(int64_t index);
    Indices take_dropped();
    void end(const Indices& run, const Indices& failed, bool is_warm);
    void change_reading(int by);
    bool is_any_on_its_way() const;
    void wake_readers();

    std::mutex mutex_;
    // For callers that wait for experts; for reader threads; for the reader that only reads ahead.
    std::condition_variable changed_, work_, advice_work_;
    std::vector<ExpertSource> sources_;
    std::vector<SourceFile> files_;
    std::vector<size_t> file_of_;      // per expert
    std::vector<uint32_t> verified_;   // per expert: `state` of its file at the last comparison; 0: never compared
    bool drops_pages_, is_closed_ = false;
    std::vector<MappedPages> mapped_;  // per expert, or empty
    Indices dropped_;                  // evicted experts whose mapped pages are still there
    std::vector<uint8_t*> addresses_;  // null: no place is known here
    std::vector<uint8_t> has_failed_;
    std::map<int64_t, Indices> spare_;  // by size: evicted experts whose places are free
    std::vector<std::pair<int64_t, int64_t>> moved_;
    std::deque<int64_t> warmup_;
    int reading_ = 0, warming_ = 0;
    int64_t last_change_ns_ = 0;
};

}  // namespace moec
