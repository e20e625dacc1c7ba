// Routing by scores that are no plain softmax: sigmoids, corrections, groups, sparsemixer. Few values per token, so the steps
// are scalar; only exponentials come from the kernels. The specification is RoutingRule in runtime/layers/routing.py.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "operations/operations.h"

namespace moec {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// In place: e^x, as in runtime/kernels/elementary.py.
void exponentials(float* x, int64_t size) {
    active_kernels().exp(x, size, x);
}

// The value of a group: the sum of its best two scores, or its best one. NaN if one is NaN.
float group_value(const float* scores, int64_t size, bool by_best_two) {
    float best = kNever, second = kNever;
    for (int64_t e = 0; e < size; ++e) {
        if (std::isnan(scores[e])) {
            return scores[e];
        }
        second = std::max(second, std::min(best, scores[e]));
        best = std::max(best, scores[e]);
    }
    return by_best_two ? second + best : best;
}

void leave_other_groups(const RoutingRule& rule, float* ranked, int64_t experts) {
    const int64_t size = experts / rule.groups;
    std::vector<float> values;
    for (int64_t group = 0; group < rule.groups; ++group) {
        values.push_back(group_value(ranked + group * size, size, rule.by_best_two));
    }
    const std::vector<int64_t> order = largest(values.data(), rule.groups, rule.groups);
    for (auto group = order.begin() + rule.kept_groups; group != order.end(); ++group) {
        std::fill(ranked + *group * size, ranked + (*group + 1) * size, kNever);
    }
}

// The first largest number, or the first NaN, as in numpy.
int64_t first_largest(const float* x, int64_t size) {
    int64_t best = 0;
    for (int64_t e = 0; e < size && !std::isnan(x[best]); ++e) {
        best = x[e] > x[best] || std::isnan(x[e]) ? e : best;
    }
    return best;
}

// In place: e^(x - peak) for the largest x.
void exponentiate(float* x, int64_t size) {
    const float peak = x[first_largest(x, size)];
    std::transform(x, x + size, x, [peak](float value) { return value - peak; });
    exponentials(x, size);
}

void divide(float* x, int64_t size, float by) {
    std::transform(x, x + size, x, [by](float value) { return value / by; });
}

// Two choices, one after the other, each weighed among the logits near it.
void sparsemixer(const float* logits, float margin, const RouteCall& call, int64_t token) {
    std::vector<float> left(logits, logits + call.expert_count), shares(left.size());
    for (int64_t rank = 0; rank < 2; ++rank) {
        const int64_t chosen = first_largest(left.data(), call.expert_count);
        const float peak = logits[chosen];
        std::transform(left.begin(), left.end(), shares.begin(), [peak](float x) { return x - peak; });
        exponentials(shares.data(), call.expert_count);
        float total = 0.0f;
        for (int64_t e = 0; e < call.expert_count; ++e) {
            const float magnitude = std::fabs(logits[e]), scale = magnitude > peak ? magnitude : peak;
            const bool is_far = (peak - logits[e]) / scale > margin;
            total += is_far ? 0.0f : shares[static_cast<size_t>(e)];
        }
        left[static_cast<size_t>(chosen)] = kNever;
        if (rank < call.top_k) {
            call.experts[token * call.top_k + rank] = static_cast<int32_t>(chosen);
            call.weights[token * call.top_k + rank] = 1.0f / total;
        }
    }
}

}  // namespace

template <class Float>
static Float numpy_sum_of(const Float* x, int64_t size) {
    constexpr int64_t kSums = 8, kAtOnce = 128;
    if (size > kAtOnce) {
        const int64_t first = size / 2 - size / 2 % kSums;
        return numpy_sum_of(x, first) + numpy_sum_of(x + first, size - first);
    }
    const int64_t whole = size < kSums ? 0 : size - size % kSums;
    Float total = 0;
    if (whole > 0) {
        Float sums[kSums];
        std::copy(x, x + kSums, sums);
        for (int64_t i = kSums; i < whole; ++i) {
            sums[i % kSums] += x[i];
        }
        total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    }
    for (int64_t i = whole; i < size; ++i) {
        total += x[i];
    }
    return total;
}

float numpy_sum(const float* x, int64_t size) {
    return numpy_sum_of(x, size);
}

double numpy_sum(const double* x, int64_t size) {
    return numpy_sum_of(x, size);
}

void softmax(float* row, int64_t size) {
    exponentiate(row, size);
    float total = 0.0f;
    for (int64_t e = 0; e < size; ++e) {  // in the order of the experts, so every instruction set gives the same bits
        total += row[e];
    }
    divide(row, size, total);
}

void sigmoid(float* x, int64_t size) {
    std::transform(x, x + size, x, [](float value) { return -value; });
    exponentials(x, size);
    std::transform(x, x + size, x, [](float value) { return 1.0f / (1.0f + value); });
}

void softplus(float* x, int64_t size) {
    constexpr int kTerms = 9;
    std::vector<float> y(x, x + size);
    std::transform(y.begin(), y.end(), y.begin(), [](float value) { return -std::fabs(value); });
    exponentials(y.data(), size);
    for (int64_t i = 0; i < size; ++i) {  // the series of elementary.py
        const double part = y[static_cast<size_t>(i)], s = part / (2 + part), square = s * s;
        double series = 1.0 / (2 * kTerms - 1);
        for (int k = kTerms - 2; k >= 0; --k) {
            series = series * square + 1.0 / (2 * k + 1);
        }
        x[i] = static_cast<float>((x[i] < 0 ? 0.0f : x[i]) + 2 * s * series);
    }
}

void expert_scores(const RoutingRule& rule, float* logits, int64_t experts) {
    if (rule.scoring == Scoring::kSigmoid) {
        sigmoid(logits, experts);
        return;
    }
    exponentiate(logits, experts);
    divide(logits, experts, numpy_sum(logits, experts));
}

void rank_experts(const RoutingRule& rule, float* scores, int64_t experts, const uint8_t* left_out) {
    for (int64_t e = 0; e < experts; ++e) {
        scores[e] = left_out != nullptr && left_out[e] != 0 ? kNever
                    : rule.correction != nullptr            ? scores[e] + rule.correction[e]
                                                            : scores[e];
    }
    if (rule.groups > 1) {
        leave_other_groups(rule, scores, experts);
    }
}

void predicted_scores(const RoutingRule& rule, float* logits, int64_t experts) {
    std::vector<uint8_t> left_out(static_cast<size_t>(experts));
    std::transform(logits, logits + experts, left_out.begin(), [](float logit) { return std::isinf(logit) && logit < 0; });
    if (rule.corrects_logits) {
        rank_experts(rule, logits, experts, left_out.data());
        sigmoid(logits, experts);
        return;
    }
    expert_scores(rule, logits, experts);
    rank_experts(rule, logits, experts, left_out.data());
    std::transform(logits, logits + experts, logits, [](float score) { return score < 0 ? 0.0f : score; });
}

void route_by_rule(const RoutingRule& rule, const RouteCall& call, int64_t tokens, const uint8_t* left_out) {
    std::vector<float> scores, ranked;
    for (int64_t t = 0; t < tokens; ++t) {
        const float* const logits = call.logits + t * call.expert_count;
        if (rule.scoring == Scoring::kSparsemixer) {
            sparsemixer(logits, rule.margin, call, t);
            continue;
        }
        scores.assign(logits, logits + call.expert_count);
        expert_scores(rule, scores.data(), call.expert_count);
        ranked.assign(rule.corrects_logits ? logits : scores.data(),
                      (rule.corrects_logits ? logits : scores.data()) + call.expert_count);
        rank_experts(rule, ranked.data(), call.expert_count, left_out);
        const int64_t looked_at = left_out == nullptr ? call.top_k : call.expert_count;
        int32_t* const experts = call.experts + t * call.top_k;
        float* const weights = call.weights + t * call.top_k;
        int64_t rank = 0;
        for (const int64_t expert : largest(ranked.data(), call.expert_count, looked_at)) {
            if (rank == call.top_k || (left_out != nullptr && left_out[expert] != 0)) {
                continue;
            }
            experts[rank] = static_cast<int32_t>(expert);
            weights[rank++] = scores[static_cast<size_t>(expert)];
        }
        if (call.renormalizes) {
            divide(weights, call.top_k, numpy_sum(weights, call.top_k) + rule.least_sum);
        }
    }
}

}  // namespace moec
