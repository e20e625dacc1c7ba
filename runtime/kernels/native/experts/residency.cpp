// Requests, advice and reads of the ledger of experts: the default path, specified by runtime/expert_cache/residency.py.
// Eviction: eviction.cpp.

#include "experts/residency.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace moec {
namespace {

constexpr int64_t kRunsOnTheWay = 2;  // for each reader

// Removes a value that occurs at most once.
void remove(std::deque<int64_t>& queue, int64_t value) {
    const auto place = std::find(queue.begin(), queue.end(), value);
    if (place != queue.end()) {
        queue.erase(place);
    }
}

// log2(2^x + 2^y), with the steps of numpy's logaddexp2, so that both give the same bits.
double log_add_exp2(double x, double y) {
    constexpr double kLog2E = 1.442695040888963407359924681001892137;
    if (x == y) {
        return x + 1;
    }
    const double most = std::max(x, y), least = std::min(x, y);
    return most + kLog2E * std::log1p(std::exp2(least - most));
}

}  // namespace

Residency::Residency(ResidencyFacts facts, Columns columns, CacheCounts* counts, int64_t capacity, int64_t pin_limit)
    : capacity_bytes(capacity), pin_limit_bytes(pin_limit), facts_(std::move(facts)), columns_(columns), counts_(counts) {
    previous_in_file_.assign(facts_.sizes.size(), -1);
    scores_.resize(facts_.sizes.size());
    log2_distance_.assign(1, 0.0);
    for (int64_t distance = 1; distance <= facts_.num_layers; ++distance) {
        log2_distance_.push_back(std::log2(static_cast<double>(distance)));
    }
    begin_sequence();
    for (int64_t index = 0; index < count(); ++index) {
        const int64_t next = facts_.next_in_file[static_cast<size_t>(index)];
        if (next >= 0) {
            previous_in_file_[static_cast<size_t>(next)] = index;
        }
        columns_.state[index] = size(index) > 0 ? kAbsent : kResident;
    }
}

void Residency::begin_sequence() {
    sequence_start_ = clock_;
    uses_before_.assign(columns_.uses, columns_.uses + count());
    uses_of_any_version_.assign(facts_.sizes.size(), 0);
}

void Residency::request(int64_t layer, const Indices& experts, Indices& hits, Indices& misses) {
    pins_.erase(std::remove_if(pins_.begin(), pins_.end(), [&](int64_t pin) { return layer_of(pin) == layer; }), pins_.end());
    const std::deque<int64_t> queued = advice;
    for (const int64_t index : queued) {
        if (layer_of(index) == layer && !contains(experts, index)) {  // predicted, but not chosen
            remove(advice, index);
            make_absent(index);
        }
    }
    backlog_.erase(std::remove_if(backlog_.begin(), backlog_.end(), [&](int64_t index) { return layer_of(index) == layer; }),
                   backlog_.end());
    ++clock_;
    layer_ = layer;
    use(experts);
    fits_pass_ = fits_pass(experts);
    has_unqueued_ = false;
    for (const int64_t index : experts) {
        if (columns_.state[index] != kResident) {
            misses.push_back(index);
            continue;
        }
        if (columns_.is_ahead[index]) {
            ++counts_->prefetch_hits;
            count_use_of_advice(index);
        }
        columns_.is_leased[index] = 1;
        hits.push_back(index);
    }
    counts_->lookups += static_cast<int64_t>(experts.size());
    counts_->hits += static_cast<int64_t>(hits.size());
    counts_->misses += static_cast<int64_t>(misses.size());
}

void Residency::use(const Indices& experts) {
    for (const int64_t index : experts) {
        columns_.heat[index] = log_add_exp2(columns_.heat[index], static_cast<double>(clock_) / facts_.half_life);
        columns_.last_used[index] = clock_;
        ++columns_.uses[index];
        ++uses_of_any_version_[static_cast<size_t>(facts_.high[static_cast<size_t>(index)])];
    }
}

bool Residency::fits_pass(const Indices& experts) const {
    int64_t needed_bytes = 0;
    for (const int64_t index : experts) {
        needed_bytes += size(index);
    }
    return facts_.encoder_layers > 0 || needed_bytes * facts_.num_layers <= capacity_bytes;
}

// ReadRuns.keep_busy in read_runs.py. A queued read takes memory, so no more are queued if a pass does not fit.
bool Residency::keeps_busy(int64_t on_the_way_bytes) const {
    return on_the_way_bytes >= kRunsOnTheWay * facts_.readers * facts_.max_run_bytes;
}

void Residency::queue_and_lease(const Indices& waiting) {
    has_unqueued_ = !queue_demand(waiting);
    if (!fits_pass_ && !has_unqueued_) {
        queue_advice();
    }
}

// Queues reads of the waiting experts. Returns false if some are left.
bool Residency::queue_demand(const Indices& waiting) {
    bool has_all = true;
    Victims victims(false);
    int64_t on_the_way_bytes = 0;
    for (const int64_t index : waiting) {
        if (columns_.is_leased[index] && (columns_.state[index] == kQueued || columns_.state[index] == kLoading)) {
            on_the_way_bytes += run_bytes(index);
        }
    }
    for (const int64_t index : waiting) {
        if (columns_.is_leased[index]) {
            continue;
        }
        const uint8_t state = columns_.state[index];
        if (state == kAbsent) {
            if (!fits_pass_ && keeps_busy(on_the_way_bytes)) {
                has_all = false;
                continue;
            }
            if (!make_room(size(index), victims, true)) {
                return false;
            }
            reserve(index);
            demand.push_back(index);
            on_the_way_bytes += run_bytes(index);
        } else if (state == kQueued) {
            // Advised, but not begun: it becomes a read on demand. An abandoned stream may already have left it in `demand`.
            if (contains(advice, index)) {
                remove(advice, index);
                columns_.is_ahead[index] = 0;
                demand.push_back(index);
            }
        } else if (state == kLoading && columns_.is_ahead[index]) {
            ++counts_->late_hits;
        }
        columns_.is_leased[index] = 1;
    }
    return has_all;
}

void Residency::advise(const Indices& indices) {
    drop_advice();
    Indices wanted = indices;
    for (const int64_t index : pins_) {
        const bool is_named =
            std::any_of(indices.begin(), indices.end(), [&](int64_t other) { return layer_of(other) == layer_of(index); });
        if (!is_named && columns_.state[index] != kAbsent) {
            wanted.push_back(index);
        }
    }
    pins_ = within_pin_limit(wanted);
    const size_t own = std::min(indices.size(), pins_.size());
    backlog_.assign(pins_.begin(), pins_.begin() + static_cast<int64_t>(own));
    queue_advice();
}

// Whether advice is queued later, because a pass does not fit and demand is not queued yet.
bool Residency::waits_for_demand() const {
    const auto is_leased = [](uint8_t leased) { return leased != 0; };
    return has_unqueued_ && !fits_pass_ &&  // a layer that gave up holds no lease
           std::any_of(columns_.is_leased, columns_.is_leased + count(), is_leased);
}

// Queue experts of the backlog, as many as may be queued at once.
void Residency::queue_advice() {
    Victims victims(true);
    int64_t queued_bytes = 0;
    for (const int64_t index : advice) {
        queued_bytes += run_bytes(index);
    }
    while (!backlog_.empty() && (facts_.most_queued == 0 || static_cast<int64_t>(advice.size()) < facts_.most_queued) &&
           !waits_for_demand()) {
        if (!fits_pass_ && keeps_busy(queued_bytes)) {
            backlog_.clear();  // more would evict what this pass needs
            return;
        }
        const int64_t index = backlog_.front();
        backlog_.pop_front();
        if (columns_.state[index] != kAbsent) {
            continue;
        }
        if (!make_room(size(index), victims, false)) {
            backlog_.clear();
            return;
        }
        reserve(index);
        columns_.is_ahead[index] = 1;
        advice.push_back(index);
        queued_bytes += run_bytes(index);
    }
}

Residency::Indices Residency::within_pin_limit(const Indices& indices) const {
    int64_t pinned = 0;
    Indices found;
    for (const int64_t index : indices) {
        pinned += size(index);
        if (pinned > pin_limit_bytes) {
            break;
        }
        found.push_back(index);
    }
    return found;
}

void Residency::drop_advice() {
    backlog_.clear();
    while (!advice.empty()) {
        const int64_t index = advice.front();
        advice.pop_front();
        make_absent(index);
    }
}

Residency::Indices Residency::next_read(Takes takes) {
    const bool takes_demand = takes == Takes::kDemand || (takes == Takes::kAny && !demand.empty());
    std::deque<int64_t>& queue = takes_demand ? demand : advice;
    if (queue.empty()) {
        return {};
    }
    Indices run = take(queue);
    for (const int64_t index : run) {
        columns_.state[index] = kLoading;
    }
    if (!takes_demand) {
        queue_advice();
    }
    return run;
}

// Takes the first expert of a queue, and queued experts that are next to it in the file. See runtime/storage/read_runs.py.
Residency::Indices Residency::take(std::deque<int64_t>& queue) {
    const int64_t waiting = static_cast<int64_t>(queue.size());
    const size_t most = static_cast<size_t>((waiting + facts_.readers - 1) / facts_.readers);
    const int64_t first = queue.front();
    queue.pop_front();
    std::deque<int64_t> run{first};
    int64_t room_bytes = facts_.max_run_bytes - size(first);
    for (const bool is_behind : {true, false}) {
        const std::vector<int64_t>& neighbours = is_behind ? facts_.next_in_file : previous_in_file_;
        int64_t index = neighbours[static_cast<size_t>(first)];
        while (run.size() < most && index >= 0 && size(index) <= room_bytes && contains(queue, index)) {
            remove(queue, index);
            is_behind ? run.push_back(index) : run.push_front(index);
            room_bytes -= size(index);
            index = neighbours[static_cast<size_t>(index)];
        }
    }
    return Indices(run.begin(), run.end());
}

void Residency::arrive(int64_t index) {
    const bool is_ahead = columns_.is_ahead[index] != 0;
    ++counts_->reads;
    counts_->bytes_read += size(index);
    counts_->rereads += columns_.is_seen[index] != 0;
    counts_->prefetch_reads += is_ahead;
    columns_.prefetches[index] += is_ahead;
    become_resident(index);
}

bool Residency::fits_free(int64_t index) const {
    return columns_.state[index] == kAbsent && used_bytes + size(index) <= capacity_bytes;
}

void Residency::begin_warm(int64_t index) {
    columns_.state[index] = kLoading;
    used_bytes += size(index);
}

void Residency::arrive_warm(int64_t index) {
    become_resident(index);
}

void Residency::fail_read(int64_t index) {
    make_absent(index);
}

void Residency::become_resident(int64_t index) {
    columns_.state[index] = kResident;
    columns_.is_seen[index] = 1;
}

void Residency::make_absent(int64_t index) {
    columns_.state[index] = kAbsent;
    columns_.is_ahead[index] = 0;
    used_bytes -= size(index);
}

void Residency::count_use_of_advice(int64_t index) {
    columns_.is_ahead[index] = 0;
    ++counts_->prefetch_used;
    ++columns_.prefetches[count() + index];
}

void Residency::reserve(int64_t index) {
    columns_.state[index] = kQueued;
    used_bytes += size(index);
}

}  // namespace moec
