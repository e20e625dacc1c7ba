// The table of kernels, one entry per instruction set, and the choice among them.

#pragma once

#include <cstdint>

#include "attention_parts.h"
#include "block.h"

namespace moec {

// Rows of floats: row i starts at base + (index ? index[i] : i) * stride.
template <class Float>
struct Rows {
    Float* base;
    int64_t stride;
    const int64_t* index;
};
using InputRows = Rows<const float>;
using OutputRows = Rows<float>;

// Rows of activations rounded to 8 bits: row i has its codes at codes + i * columns, and a step and the sum of its codes for
// every 32 columns (generic_quantized.h).
struct RoundedRows {
    const int8_t* codes;
    const float* steps;
    const float* sums;
    int64_t columns;
};

// The same rows twice: what a 16-bit matrix reads, and what a quantized one reads. The one that no matrix reads may be null.
struct Activations {
    InputRows floats;
    RoundedRows rounded;
};

// kRelu has no gate: the expert's hidden values are max(up x, 0).
enum class Activation { kSilu = 0, kClampedSwiglu = 1, kRelu = 2 };

// What becomes of the products of gate and up, to which biases are added first where there are any.
struct Gating {
    Activation activation;
    float limit;             // of a clamped activation
    const float* gate_bias;  // [F], may be null
    const float* up_bias;    // [F], may be null
};

struct AttentionCall {
    const float* q;        // [T, H, Dh]
    const void* k_cache;   // [S, Hkv, C, Dh], floats or half floats
    const void* v_cache;
    bool is_half;
    const int32_t* slots;      // [T]
    const int32_t* positions;  // [T]
    float* out;                // [T, H, Dh]
    int64_t heads, kv_heads, head_size, context;
    int64_t window;  // 0: no window
    float scale;
    const float* sinks;  // [H], scores without a value that every softmax counts; may be null
    const int32_t* ends;  // [T], where the positions that a token sees end, whatever its own; null: with its own
    const float* bias;    // [H, 2 C - 1], added to the score of position j at C - 1 + j - own position; may be null
};

struct RopeCall {
    float* x;                  // [T, H, Dh]
    const float* cos;          // [C, half]
    const float* sin;          // [C, half]
    const int32_t* positions;  // [T]
    int64_t heads, head_size, half;
};

struct RouteCall {
    const float* logits;  // [T, E]
    int32_t* experts;     // [T, K]
    float* weights;       // [T, K]
    int64_t expert_count, top_k;
    bool renormalizes;
};

// The kernels of one instruction set. They validate nothing, allocate nothing and cannot fail.
struct KernelTable {
    const char* name;
    bool (*is_supported)();
    // Row blocks [begin, end) of out = x W^T, for `tokens` rows.
    void (*linear)(const MatrixView&, const Activations& x, int64_t tokens, OutputRows out, int64_t begin, int64_t end);
    // Row blocks [begin, end) of the gated products, silu(gate x) * (up x) or another gating; `gate` is not read where there is none.
    void (*expert_hidden)(const MatrixView& gate, const MatrixView& up, const Gating& gating, const Activations& x,
                          int64_t tokens, OutputRows out, int64_t begin, int64_t end);
    // One row rounded to 8 bits: [columns] codes, [columns / 32] steps and sums.
    void (*round_row)(const float* x, int64_t columns, int8_t* codes, float* steps, float* sums);
    void (*dequantize_row)(const MatrixView&, int64_t row, float* out);
    void (*combine)(const float* parts, const float* weights, int64_t top_k, int64_t size, float* out);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t size, float* out);
    void (*rope)(const RopeCall&, int64_t token);
    void (*attention)(const AttentionCall&, const AttentionPart&, float* scores, int64_t stride);  // scores: [queries, stride >= positions]
    void (*route)(const RouteCall&, int64_t token, float* shares);                         // shares: [E]
    void (*exp)(const float* x, int64_t size, float* out);
};

const KernelTable& scalar_kernels();
// Null where the file compiles to nothing.
const KernelTable* avx2_kernels();
const KernelTable* avxvnni_kernels();
const KernelTable* avx512vnni_kernels();
const KernelTable* neon_kernels();
const KernelTable* neon_dot_kernels();
const KernelTable* neon_i8mm_kernels();

constexpr int kMaxTables = 7;

// Supported tables, best first. Returns how many.
int supported_kernels(const KernelTable* tables[kMaxTables]);

const KernelTable& active_kernels();

// False, and no change, if no supported table has this name.
bool select_kernels(const char* name);

}  // namespace moec
