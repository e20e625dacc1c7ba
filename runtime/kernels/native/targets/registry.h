// The table of kernels, one entry per instruction set, and the choice among them.

#pragma once

#include <cstdint>

#include "attention/attention_parts.h"
#include "lanes/block.h"

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

// Rows of activations rounded to 8 bits: of every 32 columns, a tile, the codes, a step and the sum of the codes
// (products/quantized.h). Rows that are multiplied together stand side by side: a tile of kRowsSideBySide rows, then the next
// tile of these, so that whatever the columns, what is read together shares no more lines of a cache than it has to. A row that
// is multiplied alone has its tiles in a row.
constexpr int kRowsSideBySide = 16;
struct RoundedRows {
    const int8_t* codes;
    const float* steps;
    const float* sums;
    int64_t columns;
    int64_t side_by_side;  // rows: kRowsSideBySide, or 1
};

// Where row i has its first tile, in tiles of one row; the next stands side_by_side further.
static inline int64_t first_tile_of(const RoundedRows& rows, int64_t i) {
    const int64_t together = rows.side_by_side;
    return i / together * together * (rows.columns / kColumnsPerTile) + i % together;
}

static inline RoundedRows rounded_row(const RoundedRows& rows, int64_t i) {
    const int64_t place = first_tile_of(rows, i);
    return {rows.codes + place * kColumnsPerTile, rows.steps + place, rows.sums + place, rows.columns, rows.side_by_side};
}

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
    bool is_interleaved;  // neighbours are turned against each other, and put into halves first, for good
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
    // One row rounded to 8 bits: [columns / 32] tiles of 32 codes, steps and sums, each `distance` tiles from the next.
    void (*round_row)(const float* x, int64_t columns, int8_t* codes, float* steps, float* sums, int64_t distance);
    void (*dequantize_row)(const MatrixView&, int64_t row, float* out);
    void (*combine)(const float* parts, const float* weights, int64_t top_k, int64_t size, float* out);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t size, float* out);
    void (*rope)(const RopeCall&, int64_t token);
    void (*attention)(const AttentionCall&, const AttentionPart&, float* scores, int64_t stride);  // scores: [queries, stride >= positions]
    void (*route)(const RouteCall&, int64_t token, float* shares);                         // shares: [E]
    void (*exp)(const float* x, int64_t size, float* out);
};

// What an instruction set does otherwise than another, from which it has the rest.
struct ProductKernels {
    bool (*is_supported)();
    decltype(KernelTable::linear) linear;
    decltype(KernelTable::expert_hidden) expert_hidden;
};

const KernelTable& scalar_kernels();
// Null where the file compiles to nothing.
const KernelTable* avx2_kernels();
const KernelTable* avxvnni_kernels();
const KernelTable* avx512vnni_kernels();
const ProductKernels* amx_products();
const KernelTable* neon_kernels();
const KernelTable* neon_dot_kernels();
const KernelTable* neon_i8mm_kernels();

constexpr int kMaxTables = 8;

// Supported tables, best first. Returns how many.
int supported_kernels(const KernelTable* tables[kMaxTables]);

const KernelTable& active_kernels();

// False, and no change, if no supported table has this name.
bool select_kernels(const char* name);

}  // namespace moec
