// Whole operations: the kernels of the active instruction set, spread over threads. Arguments are validated by the caller.
// Each returns false, with the output undefined, if there is no memory for its scratch.

#pragma once

#include <cstdint>
#include <vector>

#include "targets/registry.h"

namespace moec {

// Without a gate, `gate` is `up` once more.
struct ExpertView {
    MatrixView gate, up, down;
    Gating gating;
    const float* down_bias;  // [D], may be null
};

// Indices of an expert call: row i reads x row x_rows[i] and writes output row out_rows[i].
struct ExpertCall {
    const float* x;            // [T, D]
    const int64_t* x_rows;     // [n]
    const int64_t* out_rows;   // [n]
    int64_t count;
    float* out;                // rows of D
};

// Products of one input with several matrices, which agree in their columns: outs[i] = x W_i^T. At most kMaxMatrices.
constexpr int64_t kMaxMatrices = 8;
bool linears(const MatrixView* const* matrices, int64_t count, const float* x, int64_t tokens, float* const* outs);

// outs[i] = row i of x times matrix i transposed: the bits of `linears`, one row for each. False: no memory.
bool linears_by_row(const MatrixView* const* matrices, int64_t count, const float* x, float* const* outs);
void dequantize_rows(const MatrixView& matrix, const int64_t* rows, int64_t count, float* out);
bool expert_ffn(const ExpertView& expert, const ExpertCall& call);
// All experts of one token at once: expert i writes row out_rows[i]. They agree in D and F.
bool experts_of_token(const ExpertView* const* experts, int64_t count, const float* x, const int64_t* out_rows, float* out);
void combine(const float* parts, const float* weights, int64_t tokens, int64_t top_k, int64_t size, float* out);
void rms_norm(const float* x, const float* weight, float eps, int64_t tokens, int64_t size, float* out);
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t tokens, int64_t size, float* out);
bool rope(const RopeCall& call, int64_t tokens);
bool attention(const AttentionCall& call, int64_t tokens);
bool route(const RouteCall& call, int64_t tokens);

// To the logits of a router, [E], if it has one.
void add_bias(float* logits, const float* bias, int64_t experts);
// A router behind an RMS norm of its own.
struct NormedRouter {
    const MatrixView* matrix;  // [E, D]
    const float* norm;         // [D]
    const float* bias;         // [E]; may be null
};
// out[i] = softmax(rms_norm(x) W_i^T + bias_i) of one token, rows of E. The routers agree in D and E, at most kMaxMatrices.
bool router_shares(const NormedRouter* routers, int64_t count, float eps, const float* x, float* out);
// The indices of the largest values, at most `count`, largest first; ties: lowest index first; what is no number is last.
std::vector<int64_t> largest(const float* values, int64_t size, int64_t count);

}  // namespace moec
