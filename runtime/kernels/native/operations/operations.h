// Whole operations: they split the work over threads and call the kernels of the active instruction set (targets/kernel_table.h).
// Products: operations.cpp. Experts: expert_operations.cpp. Norms, rotation, attention, routes and sums: row_operations.cpp.
// Scores of later layers: lookahead.cpp.
// The bindings in python/ and the layers call these functions. The caller validates all arguments. Functions that return bool
// return false, with the output undefined, if there is no memory for their scratch.

#pragma once

#include <cstdint>
#include <vector>

#include "targets/kernel_table.h"

namespace moec {

// Without a gate, `gate` is a second view of `up`.
struct ExpertView {
    MatrixView gate, up, down;
    Gating gating;
    const float* down_bias;  // [D], may be null
    const BfloatKernels* bfloats = nullptr;  // by which bfloat16 matrices read rounded activations; null: they read floats
};

// Indices of an expert call: row i reads x[x_rows[i]] and writes output row out_rows[i].
struct ExpertCall {
    const float* x;            // [T, D]
    const int64_t* x_rows;     // [n]
    const int64_t* out_rows;   // [n]
    int64_t count;
    float* out;                // [rows, D]
};

// outs[i] = x W_i^T: products of one input with at most kMaxMatrices matrices of equal columns.
constexpr int64_t kMaxMatrices = 8;
bool linears(const MatrixView* const* matrices, int64_t count, const float* x, int64_t tokens, float* const* outs);

// outs[i] = x[i] W_i^T: one row per matrix, with the same bits as `linears`.
bool linears_by_row(const MatrixView* const* matrices, int64_t count, const float* x, float* const* outs);
// out = x W^T of a bfloat16 matrix, with activations rounded to bfloat16.
bool linear_of_bfloats(const BfloatKernels& kernels, const MatrixView& matrix, const float* x, int64_t tokens, float* out);
void dequantize_rows(const MatrixView& matrix, const int64_t* rows, int64_t count, float* out);
bool expert_ffn(const ExpertView& expert, const ExpertCall& call);
// The same for several experts of the same D and F, computed together as far as there is scratch for their tokens.
bool experts_ffn(const ExpertView* const* experts, const ExpertCall* calls, int64_t count);
// All experts of one token: expert i writes output row out_rows[i]. All have the same D and F.
bool experts_of_token(const ExpertView* const* experts, int64_t count, const float* x, const int64_t* out_rows, float* out);
void combine(const float* parts, const float* weights, int64_t tokens, int64_t top_k, int64_t size, float* out);
void rms_norm(const float* x, const float* weight, float eps, int64_t tokens, int64_t size, float* out);
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t tokens, int64_t size, float* out);
bool rope(const RopeCall& call, int64_t tokens);
bool attention(const AttentionCall& call, int64_t tokens);
bool route(const RouteCall& call, int64_t tokens);

// How logits become experts and weights where this is no plain softmax. The specification is RoutingRule in
// runtime/layers/routing.py.
enum class Scoring { kSoftmax, kSigmoid, kSparsemixer };
struct RoutingRule {
    Scoring scoring;
    const float* correction;  // [E], added to scores for the choice alone; may be null
    int64_t groups, kept_groups;
    bool by_best_two;         // a group is rated by its best two experts, else by its best one
    float margin;             // of kSparsemixer
    bool corrects_logits;     // the correction is added to logits, not to scores
    float least_sum;          // added to the sum of the weights before they are divided by it; sigmoids may all be 0
};
// In place: e^x / sum(e^x), 1 / (1 + e^-x), and ln(1 + e^x).
void softmax(float* row, int64_t size);
void sigmoid(float* x, int64_t size);
void softplus(float* x, int64_t size);
// The sum in the order of numpy, in which the first bundles were tested: eight sums side by side, of at most 128 values.
float numpy_sum(const float* x, int64_t size);
double numpy_sum(const double* x, int64_t size);
// In place: logits of one token to scores, [E].
void expert_scores(const RoutingRule& rule, float* logits, int64_t experts);
// In place: scores of one token to those that decide the choice, -inf for none. left_out: [E], not 0 for experts that are
// never chosen; may be null.
void rank_experts(const RoutingRule& rule, float* scores, int64_t experts, const uint8_t* left_out);
void route_by_rule(const RoutingRule& rule, const RouteCall& call, int64_t tokens, const uint8_t* left_out);

// In place: logits of one token to scores that rank predictions, [E]. An expert that is left out has the logit -inf.
void predicted_scores(const RoutingRule& rule, float* logits, int64_t experts);

// Adds the bias of a router to its logits, [E]; bias may be null.
void add_bias(float* logits, const float* bias, int64_t experts);
// A router with a norm of its own before it.
struct NormedRouter {
    const MatrixView* matrix;  // [E, D]
    const float* norm;         // [D]
    const float* bias;         // [E]; may be null; -inf for an expert that is left out
    const float* norm_bias = nullptr;     // [D], of a layer norm; null: an RMS norm
    const RoutingRule* rule = nullptr;    // null: softmax
};
// out[i] = scores of norm(x) W_i^T + bias_i for one token, rows of E. At most kMaxMatrices routers of equal D and E. Scores are
// softmax shares, or by the router's rule what decides the choice, at least 0.
bool router_shares(const NormedRouter* routers, int64_t count, float eps, const float* x, float* out);
// logits = norm(x) W^T + bias of one router. x: [T, D]; logits: [T, E].
bool router_logits(const NormedRouter& router, float eps, const float* x, int64_t tokens, float* logits);
// out[e] = sum over the tokens, in order, of the scores of these logits, which are overwritten. out: [E].
void router_demand(const NormedRouter& router, float* logits, int64_t tokens, float* out);
// Indices of the `count` largest values, largest first. Equal values: the lowest index first. NaN comes last.
std::vector<int64_t> largest(const float* values, int64_t size, int64_t count);
std::vector<int64_t> largest(const double* values, int64_t size, int64_t count);

}  // namespace moec
