// Norms, rotation, routes and sums, split over threads by tokens. Attention, split by tokens and heads.
// Products: operations.cpp.
// A split never changes a result: one thread computes each output value, in an order that depends only on its own inputs.
// The scratch is at most:
// - attention: threads x 4 x positions floats
// - routes: threads x E floats
// - rotations of adjacent pairs: threads x half of the rotated features, floats

#include "operations/operations.h"

#include <algorithm>

#include "operations/split_work.h"

namespace moec {
void combine(const float* parts, const float* weights, int64_t tokens, int64_t top_k, int64_t size, float* out) {
    const KernelTable& kernels = active_kernels();
    const double flops = 2.0 * static_cast<double>(tokens) * static_cast<double>(top_k) * static_cast<double>(size);
    split_tokens(tokens, threads_for(flops), [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; ++t) {
            kernels.combine(parts + t * top_k * size, weights + t * top_k, top_k, size, out + t * size);
        }
    });
}

void rms_norm(const float* x, const float* weight, float eps, int64_t tokens, int64_t size, float* out) {
    const KernelTable& kernels = active_kernels();
    const double flops = 4.0 * static_cast<double>(tokens) * static_cast<double>(size);
    split_tokens(tokens, threads_for(flops), [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; ++t) {
            kernels.rms_norm(x + t * size, weight, eps, size, out + t * size);
        }
    });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t tokens, int64_t size, float* out) {
    const KernelTable& kernels = active_kernels();
    const double flops = 7.0 * static_cast<double>(tokens) * static_cast<double>(size);
    split_tokens(tokens, threads_for(flops), [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; ++t) {
            kernels.layer_norm(x + t * size, weight, bias, eps, size, out + t * size);
        }
    });
}

// Moves adjacent pairs into halves: the first feature of each pair, then the second. spare: [half].
static void part_pairs(float* pairs, int64_t half, float* spare) {
    for (int64_t i = 0; i < half; ++i) {
        spare[i] = pairs[2 * i + 1];
        pairs[i] = pairs[2 * i];
    }
    std::copy(spare, spare + half, pairs + half);
}

bool rope(const RopeCall& call, int64_t tokens) {
    const KernelTable& kernels = active_kernels();
    const double flops = 6.0 * static_cast<double>(tokens) * static_cast<double>(call.heads) * static_cast<double>(call.half);
    const int threads = threads_for(flops);  // read once: another thread may change the number
    float* spare = call.is_interleaved ? operation_scratch.take(threads * call.half) : nullptr;
    if (call.is_interleaved && spare == nullptr && call.half > 0) {
        return false;
    }
    split_tokens(tokens, threads, [&](int64_t first, int64_t last, int worker) {
        for (int64_t t = first; t < last; ++t) {
            for (int64_t head = 0; call.is_interleaved && head < call.heads; ++head) {
                part_pairs(call.x + (t * call.heads + head) * call.head_size, call.half, spare + worker * call.half);
            }
            kernels.rope(call, t);
        }
    });
    return true;
}

bool attention(const AttentionCall& call, int64_t tokens) {
    const KernelTable& kernels = active_kernels();
    int64_t longest = 0;
    double pairs = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t seen = int64_t{call.positions[t]} + 1;
        const int64_t count = call.ends != nullptr ? call.ends[t] : call.window > 0 ? std::min(seen, call.window) : seen;
        longest = std::max(longest, count);
        pairs += static_cast<double>(count);
    }
    const int threads =
        threads_for(pairs * static_cast<double>(call.heads) * (4.0 * static_cast<double>(call.head_size) + kFlopsPerExp));
    float* scores = operation_scratch.take(threads * kMaxAttentionQueries * longest);
    if (scores == nullptr && longest > 0) {
        return false;
    }
    // A part has heads that share keys and values, and consecutive tokens as far as there is room. The parts of one head
    // follow one another, while its keys and values are in the processor's cache.
    const int64_t sharing = call.heads / call.kv_heads, heads = std::min<int64_t>(sharing, kMaxAttentionQueries);
    const int64_t runs = (sharing + heads - 1) / heads, tokens_at_once = kMaxAttentionQueries / heads;
    const int64_t rows = (tokens + tokens_at_once - 1) / tokens_at_once;
    parallel_for(call.kv_heads * runs * rows, threads, [&](int64_t item, int worker) {
        const int64_t run = item / rows, head = run / runs * sharing + run % runs * heads;
        const int64_t last = std::min(tokens, (item % rows + 1) * tokens_at_once);
        AttentionPart part{item % rows * tokens_at_once, 0, head, std::min(heads, (run / runs + 1) * sharing - head)};
        for (; part.first_token < last; part.first_token += part.tokens) {
            part.tokens = 1;
            while (part.first_token + part.tokens < last &&
                   call.slots[part.first_token + part.tokens] == call.slots[part.first_token]) {
                ++part.tokens;
            }
            kernels.attention(call, part, scores + worker * kMaxAttentionQueries * longest, longest);
        }
    });
    return true;
}

bool route(const RouteCall& call, int64_t tokens) {
    const KernelTable& kernels = active_kernels();
    const double per_expert = kFlopsPerExp + 4.0 * static_cast<double>(call.top_k);
    const double flops = per_expert * static_cast<double>(tokens) * static_cast<double>(call.expert_count);
    const int threads = threads_for(flops);
    float* shares = operation_scratch.take(threads * call.expert_count);
    if (shares == nullptr) {
        return false;
    }
    split_tokens(tokens, threads, [&](int64_t first, int64_t last, int worker) {
        for (int64_t t = first; t < last; ++t) {
            kernels.route(call, t, shares + worker * call.expert_count);
        }
    });
    return true;
}

}  // namespace moec
