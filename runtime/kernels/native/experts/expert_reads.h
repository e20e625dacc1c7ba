// The expert cache of runtime/expert_cache/python_cache.py without the interpreter in its way: threads that read what a Residency queues,
// into the places of experts that were evicted, and callers that wait for them.
//
// What has no place of its size to take or failed is handed to Python, which knows places and errors. So is, for its checksum,
// what is read for the first time, or from a file that has changed since: runtime/storage/read_verifier.py is the specification.
// Everything else is one pread and one fstat between two short holds of a lock.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "experts/file_identity.h"
#include "experts/operations.h"
#include "experts/residency.h"

namespace moec {

// Where the bytes of one expert lie in its file, and those of its matrices in it; -1: no gate.
struct ExpertSource {
    int descriptor;
    int64_t offset_bytes, size_bytes;
    ExpertView* view;  // null: left out of its model
    int64_t gate_bytes, up_bytes, down_bytes;
};

class ExpertReads : public Residency {
  public:
    enum class Wait { kReady, kAgain, kFailed, kTooLarge, kClosed };
    // Reads a run by other means, or compares one with its checksums; says which of it failed. Called without the lock.
    using Load = std::function<Indices(const Indices&)>;
    using Check = std::function<Indices(const Indices&, const std::vector<uint8_t*>& addresses)>;

    ExpertReads(ResidencyFacts facts, Columns columns, CacheCounts* counts, int64_t capacity_bytes, int64_t pin_limit_bytes,
                std::vector<ExpertSource> sources, bool drops_pages);

    // Of a reader thread, until `close`. Without a check nothing is compared.
    void serve(const Load& load, const Check& check);
    void close();

    // One layer asks: hits, leased, and misses, of which as many are queued and leased as fit now.
    bool begin(int64_t layer, const Indices& experts, Indices& hits, Indices& misses);
    // Wait for some of the remaining experts: all that are there, or one; with kFailed, one that cannot be read. kAgain after
    // a while, for a look at signals.
    Wait wait(const Indices& remaining, bool together, Indices& found);
    void unlease(const Indices& indices);
    void prefetch(const Indices& indices);
    void warm(const Indices& indices);
    // False while there is something to warm; returns after a while at the latest.
    bool wait_warmed();
    // False while reads stand in the way; returns after a while at the latest.
    bool resize(int64_t capacity_bytes, int64_t pin_limit_bytes);
    // Experts that took the place of another since the last call, {of, by}, and experts whose places are free.
    void take_places(std::vector<std::pair<int64_t, int64_t>>& moved, Indices& spare);
    // An expert has been read there by Python, and is what it should be.
    void place(int64_t index, uint8_t* address);
    bool has_work();
    struct Ledger {
        int64_t capacity_bytes, pin_limit_bytes, used_bytes;
    };
    Ledger ledger();
    // Bytes as counted, and as the states add them up; equal, unless there is a fault.
    std::pair<int64_t, int64_t> audit();

  protected:
    void left(int64_t index) override;

  private:
    using Lock = std::unique_lock<std::mutex>;

    // A file that experts are read from. state: counts the identities that it has had, from 1 on.
    struct SourceFile {
        int descriptor;
        FileIdentity identity;
        uint32_t state;
    };

    bool is_verified(const Indices& run, uint32_t state) const;
    void note_verified(const Indices& run, const Indices& failed, const SourceFile& before, const FileIdentity& after);
    SourceFile& file_of(const Indices& run) { return files_[file_of_[static_cast<size_t>(run[0])]]; }
    Indices next_run(Lock& lock, bool& is_warm);
    bool give_places(const Indices& run);
    void follow(int64_t index);
    bool read(const Indices& run, const std::vector<uint8_t*>& addresses) const;
    void end(const Indices& run, const Indices& failed, bool is_warm);
    void change_reading(int by);
    bool is_any_on_its_way() const;
    void wake_readers();

    std::mutex mutex_;
    std::condition_variable changed_, work_;  // for those who wait for experts; for readers
    std::vector<ExpertSource> sources_;
    std::vector<SourceFile> files_;
    std::vector<size_t> file_of_;      // per expert
    std::vector<uint32_t> verified_;   // per expert: the state of its file in which it was compared; 0: in none
    bool drops_pages_, is_closed_ = false;
    std::vector<uint8_t*> addresses_;  // null: no place that is known here
    std::vector<uint8_t> has_failed_;
    std::map<int64_t, Indices> spare_;  // by size: evicted experts whose places nobody has taken
    std::vector<std::pair<int64_t, int64_t>> moved_;
    std::deque<int64_t> warmup_;
    int reading_ = 0, warming_ = 0;
    int64_t last_change_ns_ = 0;
};

}  // namespace moec
