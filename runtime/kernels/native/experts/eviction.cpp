// Eviction on the default path, specified by runtime/expert_cache/eviction.py. `make_room` evicts until there is room,
// `next_victim` gives the expert to evict next, `goes_before` is the order of the policy, and `evict` marks the expert
// absent. Where its memory goes: reader_threads.cpp.

#include <algorithm>

#include "experts/residency.h"

namespace moec {
namespace {

constexpr size_t kFew = 8;  // more experts are rarely evicted at once

}  // namespace

void Residency::evict(int64_t index) {
    left(index);
    make_absent(index);
    ++counts_->evictions;
}

bool Residency::goes_before(int64_t one, int64_t other) const {
    if (facts_.score == Score::kHeat && columns_.heat[one] != columns_.heat[other]) {
        return columns_.heat[one] < columns_.heat[other];
    }
    if (facts_.score == Score::kUses && columns_.uses[one] != columns_.uses[other]) {
        return columns_.uses[one] < columns_.uses[other];
    }
    if (columns_.last_used[one] != columns_.last_used[other]) {
        return columns_.last_used[one] < columns_.last_used[other];
    }
    return one < other;
}

void Residency::make(Victims& victims) const {
    victims.is_made = true;
    for (int64_t index = 0; index < count(); ++index) {
        if (is_evictable(index) && size(index) > 0) {
            victims.order.push_back(index);
        }
    }
    for (size_t i = pins_.size(); i-- > 0;) {
        if (!contains(victims.pins, pins_[i])) {
            victims.pins.push_back(pins_[i]);
        }
    }
}

int64_t Residency::next_victim(Victims& victims) const {
    if (!victims.is_made) {
        make(victims);
    }
    std::vector<int64_t>& order = victims.order;
    while (victims.next < order.size()) {
        if (victims.next == victims.sorted) {  // sort a few first, and the rest only if needed
            victims.sorted = victims.sorted == 0 ? std::min(kFew, order.size()) : order.size();
            std::partial_sort(order.begin() + static_cast<int64_t>(victims.next),
                              order.begin() + static_cast<int64_t>(victims.sorted), order.end(),
                              [this](int64_t one, int64_t other) { return goes_before(one, other); });
        }
        const int64_t index = order[victims.next++];
        if (is_evictable(index) && !contains(victims.pins, index)) {
            return index;
        }
    }
    while (!victims.spares_pins && victims.next_pin < victims.pins.size()) {
        const int64_t index = victims.pins[victims.next_pin++];
        if (is_evictable(index) && contains(order, index)) {
            return index;
        }
    }
    return -1;
}

// Evicts until need_bytes are free. Demand first withdraws advice, the least likely first. Returns false if there is not enough
// to evict before leases or reads end.
bool Residency::make_room(int64_t need_bytes, Victims& victims, bool is_demand) {
    int64_t missing = used_bytes + need_bytes - capacity_bytes;
    while (is_demand && !advice.empty() && missing > 0) {
        const int64_t index = advice.back();
        advice.pop_back();
        make_absent(index);
        missing -= size(index);
    }
    Indices taken;
    while (missing > 0) {
        const int64_t victim = next_victim(victims);
        if (victim < 0) {
            return false;
        }
        taken.push_back(victim);
        missing -= size(victim);
    }
    for (const int64_t victim : taken) {
        evict(victim);
    }
    return true;
}

bool Residency::shrink() {
    drop_advice();
    Victims victims(false);
    while (used_bytes > capacity_bytes) {
        const int64_t victim = next_victim(victims);
        if (victim < 0) {
            return false;
        }
        evict(victim);
    }
    return true;
}

}  // namespace moec
