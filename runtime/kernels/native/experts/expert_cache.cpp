// Callers of the expert cache: they request experts, wait for them, and end their leases. The reader threads, and the memory
// that they read into: reader_threads.cpp. Which expert is evicted: eviction.cpp.

#include "experts/expert_cache.h"

#include <algorithm>
#include <chrono>


namespace moec {
namespace {

constexpr std::chrono::milliseconds kLook{100};  // longest wait before Python looks at its signals

}  // namespace

ExpertCache::ExpertCache(ResidencyFacts facts, Columns columns, CacheCounts* counts, int64_t capacity, int64_t pin_limit,
                         std::vector<ExpertSource> sources, bool drops_pages, std::vector<MappedPages> mapped)
    : Residency(std::move(facts), columns, counts, capacity, pin_limit),
      sources_(std::move(sources)),
      file_of_(sources_.size()),
      verified_(sources_.size(), 0),
      drops_pages_(drops_pages),
      mapped_(std::move(mapped)),
      addresses_(sources_.size(), nullptr),
      has_failed_(sources_.size(), 0) {
    for (size_t index = 0; index < sources_.size(); ++index) {
        const int descriptor = sources_[index].descriptor;
        const auto found =
            std::find_if(files_.begin(), files_.end(), [=](const SourceFile& file) { return file.descriptor == descriptor; });
        file_of_[index] = static_cast<size_t>(found - files_.begin());
        if (found == files_.end()) {
            files_.push_back({descriptor, identity_of(descriptor), 1});
        }
    }
}

void ExpertCache::close() {
    const Lock lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
    work_.notify_all();
    advice_work_.notify_all();
}

bool ExpertCache::has_work() {
    const Lock lock(mutex_);
    return !demand.empty() || !advice.empty() || !warmup_.empty();
}

bool ExpertCache::is_held(int64_t index) {
    const Lock lock(mutex_);
    return columns_.state[index] == kLoading || columns_.state[index] == kResident;
}

ExpertCache::Ledger ExpertCache::ledger() {
    const Lock lock(mutex_);
    return {capacity_bytes, pin_limit_bytes, used_bytes};
}

std::pair<int64_t, int64_t> ExpertCache::audit() {
    const Lock lock(mutex_);
    int64_t held_bytes = 0;
    for (int64_t index = 0; index < count(); ++index) {
        held_bytes += columns_.state[index] == kAbsent ? 0 : size(index);
    }
    return {used_bytes, held_bytes};
}

void ExpertCache::wake_readers() {
    const bool has_advice_reader = facts_.most_queued != 0;
    if (!demand.empty() || (!advice.empty() && !has_advice_reader) || !warmup_.empty()) {
        work_.notify_all();  // a layer that only hits must not wake the readers
    }
    if (!advice.empty() && has_advice_reader) {
        advice_work_.notify_one();
    }
}

bool ExpertCache::request_and_queue(int64_t layer, const Indices& experts, Indices& hits, Indices& misses) {
    const Lock lock(mutex_);
    if (is_closed_) {
        return false;
    }
    request(layer, experts, hits, misses);
    queue_and_lease(misses);
    wake_readers();
    return true;
}

void ExpertCache::queue_more(const Indices& remaining) {
    const Lock lock(mutex_);
    queue_and_lease(remaining);
    wake_readers();
}

ExpertCache::Wait ExpertCache::wait(const Indices& remaining, bool together, Indices& found) {
    const int64_t start_ns = now_ns();
    const auto end = std::chrono::steady_clock::now() + kLook;
    Lock lock(mutex_);
    Wait state = Wait::kAgain;
    for (;;) {
        const auto has_failed = [this](int64_t index) { return has_failed_[static_cast<size_t>(index)] != 0; };
        const auto failed = std::find_if(remaining.begin(), remaining.end(), has_failed);
        if (is_closed_) {
            state = Wait::kClosed;
            break;
        }
        if (failed != remaining.end()) {
            counts_->stall_ns += now_ns() - start_ns;
            found.push_back(*failed);
            return Wait::kFailed;
        }
        queue_and_lease(remaining);
        wake_readers();
        bool is_leased = false;
        for (const int64_t index : remaining) {
            is_leased |= columns_.is_leased[index] != 0;
            if (columns_.is_leased[index] && columns_.state[index] == kResident && (together || found.empty())) {
                found.push_back(index);
            }
        }
        if (!found.empty()) {
            state = Wait::kReady;
            break;
        }
        if (!is_leased && !is_any_on_its_way()) {
            state = Wait::kTooLarge;
            break;
        }
        if (changed_.wait_until(lock, end) == std::cv_status::timeout) {
            break;
        }
    }
    for (const int64_t index : found) {
        if (columns_.is_ahead[index]) {
            count_use_of_advice(index);
        }
    }
    counts_->stall_ns += now_ns() - start_ns;
    return state;
}

// Returns whether a read is queued or running, also one of an abandoned stream. When it ends, its expert can be evicted.
bool ExpertCache::is_any_on_its_way() const {
    return std::any_of(columns_.state, columns_.state + count(),
                       [](uint8_t state) { return state == kQueued || state == kLoading; });
}

void ExpertCache::unlease(const Indices& indices) {
    const Lock lock(mutex_);
    for (const int64_t index : indices) {
        columns_.is_leased[index] = 0;
        has_failed_[static_cast<size_t>(index)] = 0;
    }
    changed_.notify_all();
}

void ExpertCache::restart_sequence() {
    const Lock lock(mutex_);
    begin_sequence();
}

void ExpertCache::prefetch(const Indices& indices) {
    const Lock lock(mutex_);
    advise(indices);
    wake_readers();
}

void ExpertCache::warm(const Indices& indices) {
    const Lock lock(mutex_);
    warmup_.assign(indices.begin(), indices.end());
    wake_readers();
}

bool ExpertCache::wait_warmed() {
    Lock lock(mutex_);
    return changed_.wait_for(lock, kLook, [this] { return is_closed_ || (warmup_.empty() && warming_ == 0); });
}

bool ExpertCache::resize(int64_t capacity, int64_t pin_limit) {
    Lock lock(mutex_);
    capacity_bytes = capacity;
    pin_limit_bytes = pin_limit;
    if (used_bytes <= capacity_bytes || shrink() || is_closed_) {
        return true;
    }
    if (reading_ == 0 && demand.empty()) {
        return true;  // only leases are in the way, and the caller has to end them
    }
    changed_.wait_for(lock, kLook);
    return used_bytes <= capacity_bytes;
}

void ExpertCache::take_places(std::vector<std::pair<int64_t, int64_t>>& moved, Indices& spare) {
    const Lock lock(mutex_);
    if (!mapped_.empty()) {
        spare = take_dropped();
        return;
    }
    size_t count = 0;
    for (const auto& [size, experts] : spare_) {
        count += experts.size();
    }
    spare.reserve(count);  // first: without memory, nothing must have been taken yet
    moved.swap(moved_);
    for (auto& [size, experts] : spare_) {
        for (const int64_t index : experts) {
            addresses_[static_cast<size_t>(index)] = nullptr;
            spare.push_back(index);
        }
    }
    spare_.clear();
}

void ExpertCache::place(int64_t index, uint8_t* address) {
    const Lock lock(mutex_);
    addresses_[static_cast<size_t>(index)] = address;
}

}  // namespace moec
