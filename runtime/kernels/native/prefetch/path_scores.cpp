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
    const int64_t experts = tables.num_experts;
    scores.assign(static_cast<size_t>(experts), 0.0);
    std::vector<double> sums;
    for (const int32_t last : chosen) {
        for (const int32_t one : before) {
            const int64_t key = (following * experts + one) * experts + last;
            const int64_t* const end = tables.keys + tables.num_keys;
            const int64_t* const found = std::lower_bound(tables.keys, end, key);
            if (found != end && *found == key) {
                add_row(tables, found - tables.keys, scores, sums);
            }
        }
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
