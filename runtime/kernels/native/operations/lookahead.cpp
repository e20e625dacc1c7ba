// Scores of the experts of later layers: norm, product, softmax or the router's rule. For one token one product serves all
// routers. The scores of several tokens are added.

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "operations/operations.h"

namespace moec {

static void scores_of(const NormedRouter& router, float* row, int64_t experts) {
    if (router.rule == nullptr) {
        softmax(row, experts);
    } else {
        predicted_scores(*router.rule, row, experts);
    }
}

void add_bias(float* logits, const float* bias, int64_t experts) {
    for (int64_t e = 0; bias != nullptr && e < experts; ++e) {
        logits[e] += bias[e];
    }
}

bool router_shares(const NormedRouter* routers, int64_t count, float eps, const float* x, float* out) {
    const KernelTable& kernels = active_kernels();
    const int64_t size = routers[0].matrix->columns, experts = routers[0].matrix->rows;
    // Not from the scratch, which the products use.
    std::unique_ptr<float[]> normed(new (std::nothrow) float[static_cast<size_t>(count * size)]);
    if (normed == nullptr) {
        return false;
    }
    const MatrixView* matrices[kMaxMatrices];
    float* rows[kMaxMatrices];
    for (int64_t i = 0; i < count; ++i) {
        float* const row = normed.get() + i * size;
        if (routers[i].norm_bias == nullptr) {
            kernels.rms_norm(x, routers[i].norm, eps, size, row);
        } else {
            kernels.layer_norm(x, routers[i].norm, routers[i].norm_bias, eps, size, row);
        }
        matrices[i] = routers[i].matrix;
        rows[i] = out + i * experts;
    }
    if (!linears_by_row(matrices, count, normed.get(), rows)) {
        return false;
    }
    for (int64_t i = 0; i < count; ++i) {
        add_bias(rows[i], routers[i].bias, experts);
        scores_of(routers[i], rows[i], experts);
    }
    return true;
}

bool router_logits(const NormedRouter& router, float eps, const float* x, int64_t tokens, float* logits) {
    const int64_t size = router.matrix->columns, experts = router.matrix->rows;
    std::unique_ptr<float[]> normed(new (std::nothrow) float[static_cast<size_t>(tokens * size)]);
    if (normed == nullptr) {
        return false;
    }
    if (router.norm_bias == nullptr) {
        rms_norm(x, router.norm, eps, tokens, size, normed.get());
    } else {
        layer_norm(x, router.norm, router.norm_bias, eps, tokens, size, normed.get());
    }
    if (!linears(&router.matrix, 1, normed.get(), tokens, &logits)) {
        return false;
    }
    for (int64_t t = 0; t < tokens; ++t) {
        add_bias(logits + t * experts, router.bias, experts);
    }
    return true;
}

void router_demand(const NormedRouter& router, float* logits, int64_t tokens, float* out) {
    const int64_t experts = router.matrix->rows;
    std::fill(out, out + experts, 0.0f);
    for (int64_t t = 0; t < tokens; ++t) {
        float* const row = logits + t * experts;
        scores_of(router, row, experts);
        for (int64_t e = 0; e < experts; ++e) {
            out[e] += row[e];
        }
    }
}

template <class Float>
static std::vector<int64_t> largest_of(const Float* values, int64_t size, int64_t count) {
    const auto is_before = [values](int64_t one, int64_t other) {
        if (std::isnan(values[other])) {
            return !std::isnan(values[one]) || one < other;
        }
        return values[one] > values[other] || (values[one] == values[other] && one < other);
    };
    std::vector<int64_t> order(static_cast<size_t>(size));
    std::iota(order.begin(), order.end(), int64_t{0});
    const int64_t kept = std::clamp(count, int64_t{0}, size);
    std::partial_sort(order.begin(), order.begin() + kept, order.end(), is_before);
    order.resize(static_cast<size_t>(kept));
    return order;
}

std::vector<int64_t> largest(const float* values, int64_t size, int64_t count) {
    return largest_of(values, size, count);
}

std::vector<int64_t> largest(const double* values, int64_t size, int64_t count) {
    return largest_of(values, size, count);
}

}  // namespace moec
