// Eviction on the default path, specified by runtime/expert_cache/eviction.py. `make_room` evicts until there is room,
// `next_victim` gives the expert to evict next, `score` is that of the policy (policies.py), and `evict` marks the expert
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

// Layers that run until the layer does: 1 for the one after the running layer, all of the decoder for the running one. After
// any layer of an encoder the next one that counts is the decoder's first.
int64_t Residency::distance(int64_t layer, int64_t running) const {
    const int64_t layers = decoder_layers(), ahead = layer - std::max(running, facts_.encoder_layers - 1) - 1;
    return (ahead % layers + layers) % layers + 1;
}

// Lower groups are evicted first: finished layers of an encoder, its later layers, the decoder.
int Residency::eviction_group(int64_t index) const {
    return layer_of(index) >= facts_.encoder_layers ? 2 : layer_of(index) > layer_ ? 1 : 0;
}

// The steps are those of MultidimensionalScore in policies.py, so that both give the same bits.
double Residency::hobbit_score(int64_t index) const {
    const size_t at = static_cast<size_t>(index), high = static_cast<size_t>(facts_.high[at]);
    const int64_t layers = decoder_layers(), first_pass = sequence_start_ + facts_.encoder_layers + 1;
    const double passes = static_cast<double>(std::max(int64_t{0}, clock_ - first_pass) / layers + 1);
    const int64_t since = columns_.last_used[index] - first_pass;
    const double last_pass = since < 0 ? 0.0 : static_cast<double>(since / layers + 1);
    double score = facts_.weights.lru / passes * last_pass;
    score += facts_.weights.lfu / passes * static_cast<double>(uses_of_any_version_[high]);
    if (facts_.weights.lhu != 0.0) {
        score += facts_.weights.lhu / passes * static_cast<double>(columns_.uses[high] - uses_before_[high]);
    }
    const int64_t running = (layer_ - facts_.weights.layers_back + facts_.num_layers) % facts_.num_layers;
    const double nearness =
        1.0 - static_cast<double>(distance(layer_of(index), running) - 1) / static_cast<double>(layers);
    score += facts_.weights.fld * nearness;
    return score;
}

double Residency::score(int64_t index) const {
    switch (facts_.score) {
        case Score::kHeat:
            return fits_pass_ ? columns_.heat[index]
                              : columns_.heat[index] -
                                    log2_distance_[static_cast<size_t>(distance(layer_of(index), layer_))];
        case Score::kUses:
            return static_cast<double>(columns_.uses[index]);
        case Score::kEdgeMoe:
            return facts_.frequency[static_cast<size_t>(index)] / static_cast<double>(distance(layer_of(index), layer_));
        case Score::kHobbit:
            return hobbit_score(index);
        case Score::kLastUsed:
            break;
    }
    return static_cast<double>(columns_.last_used[index]);
}

bool Residency::goes_before(int64_t one, int64_t other) const {
    if (facts_.encoder_layers > 0 && eviction_group(one) != eviction_group(other)) {
        return eviction_group(one) < eviction_group(other);
    }
    const double own = scores_[static_cast<size_t>(one)], others = scores_[static_cast<size_t>(other)];
    if (own != others) {
        return own < others;
    }
    if (columns_.last_used[one] != columns_.last_used[other]) {
        return columns_.last_used[one] < columns_.last_used[other];
    }
    return one < other;
}

void Residency::make(Victims& victims) {
    victims.is_made = true;
    for (int64_t index = 0; index < count(); ++index) {
        if (is_evictable(index) && size(index) > 0) {
            victims.order.push_back(index);
            scores_[static_cast<size_t>(index)] = score(index);
        }
    }
    for (size_t i = pins_.size(); i-- > 0;) {
        if (!contains(victims.pins, pins_[i])) {
            victims.pins.push_back(pins_[i]);
        }
    }
}

int64_t Residency::next_victim(Victims& victims) {
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
