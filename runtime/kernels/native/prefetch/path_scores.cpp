#include "prefetch/path_scores.h"

#include <algorithm>

namespace moec {
namespace {

bool any(const std::vector<double>& scores) {
    return std::any_of(scores.begin(), scores.end(), [](double score) { return score != 0.0; });
}

// Add the shares of one row of the dictionary. An expert that stands twice in the row counts once, as in numpy.
void add_row(const PathTables& tables, int64_t row, std::vector<double>& scores, std::vector<double>& sums) {
    const int64_t begin = tables.offsets[row], end = tables.offsets[row + 1];
    double total = 0.0;
    for (int64_t at = begin; at < end; ++at) {
        total += static_cast<double>(tables.counts[at]);
    }
    if (total < tables.least_count) {
        return;
    }
    sums.clear();
    for (int64_t at = begin; at < end; ++at) {
        sums.push_back(scores[tables.experts[at]] + static_cast<double>(tables.counts[at]) / total);
    }
    for (int64_t at = begin; at < end; ++at) {
        scores[tables.experts[at]] = sums[static_cast<size_t>(at - begin)];
    }
}

// Add the shares of every pair of experts of two layers.
void add_pairs(const PathTables& tables, int64_t following, const std::vector<int32_t>& before, const std::vector<int32_t>& chosen,
               std::vector<double>& scores, std::vector<double>& sums) {
    for (const int32_t last : chosen) {
        for (const int32_t one : before) {
            const int64_t key = (following * tables.num_experts + one) * tables.num_experts + last;
            const int64_t* const end = tables.keys + tables.num_keys;
            const int64_t* const found = std::lower_bound(tables.keys, end, key);
            if (found != end && *found == key) {
                add_row(tables, found - tables.keys, scores, sums);
            }
        }
    }
}

// Add the shares of the exact sets of experts of two layers. Sets of another size are not in the dictionary.
void add_sets(const PathTables& tables, int64_t following, const std::vector<int32_t>& before, const std::vector<int32_t>& chosen,
              std::vector<double>& scores, std::vector<double>& sums) {
    const auto top_k = static_cast<size_t>(tables.top_k), width = 1 + 2 * top_k;
    if (before.size() != top_k || chosen.size() != top_k) {
        return;
    }
    std::vector<uint16_t> key{static_cast<uint16_t>(following)};
    key.insert(key.end(), before.begin(), before.end());
    key.insert(key.end(), chosen.begin(), chosen.end());
    const auto middle = key.begin() + 1 + tables.top_k;
    std::sort(key.begin() + 1, middle);
    std::sort(middle, key.end());
    int64_t low = 0, high = tables.num_keys;
    while (low < high) {
        const int64_t at = low + (high - low) / 2;
        const uint16_t* const row = tables.sets + static_cast<size_t>(at) * width;
        if (std::lexicographical_compare(row, row + width, key.begin(), key.end())) {
            low = at + 1;
        } else {
            high = at;
        }
    }
    if (low < tables.num_keys && std::equal(key.begin(), key.end(), tables.sets + static_cast<size_t>(low) * width)) {
        add_row(tables, low, scores, sums);
    }
}

void add_transitions(const PathTables& tables, int64_t layer, int32_t last, std::vector<double>& scores) {
    const uint32_t* const counts = tables.transitions + (layer * tables.num_experts + last) * tables.num_experts;
    double total = 0.0;
    for (int64_t e = 0; e < tables.num_experts; ++e) {
        total += static_cast<double>(counts[e]);
    }
    total = std::max(total, 1.0);
    for (int64_t e = 0; e < tables.num_experts; ++e) {
        scores[static_cast<size_t>(e)] += static_cast<double>(counts[e]) / total;
    }
}

}  // namespace

bool path_scores(const PathTables& tables, int64_t following, const PathSource& source, const std::vector<int32_t>& before,
                 const std::vector<int32_t>& chosen, std::vector<double>& scores) {
    scores.assign(static_cast<size_t>(tables.num_experts), 0.0);
    std::vector<double> sums;
    if (tables.sets != nullptr) {
        add_sets(tables, following, before, chosen, scores, sums);
    } else {
        add_pairs(tables, following, before, chosen, scores, sums);
    }
    if (any(scores)) {
        return true;
    }
    for (const int32_t last : chosen) {
        add_transitions(tables, source.last, last, scores);
    }
    return any(scores);
}

}  // namespace moec
