// The table of kernels, one per instruction set. The choice among the tables is in targets/choose_kernels.cpp. Start here to
// see which kernels exist; each targets/kernels_*.cpp fills one table with the functions of products/, attention/ and
// quantization/.

#pragma once

#include <cstdint>

#include "lanes/block.h"

namespace moec {

constexpr int kMaxAttentionQueries = 4;

// An element of a cache of half floats.
struct HalfFloat {
    uint16_t bits;
};

// `tokens` consecutive tokens of one sequence times `heads` heads that share keys and values.
// At most kMaxAttentionQueries queries.
struct AttentionPart {
    int64_t first_token, tokens, first_head, heads;
};

// The query of one token and head. It sees positions [first, end).
struct AttentionQuery {
    const float* q;  // [Dh]
    float* scores;   // [end - first]
    float* out;      // [Dh]
    int64_t first, end;
};

// Rows of floats: row i starts at base + (index ? index[i] : i) * stride.
template <class Float>
struct Rows {
    Float* base;
    int64_t stride;
    const int64_t* index;
};
using InputRows = Rows<const float>;
using OutputRows = Rows<float>;

// Rows of activations rounded to 8 bits (products/rounding.h). Each tile of 32 columns has 32 codes, a step and the sum of its
// codes. Rows that are multiplied together stand side by side: one tile of kRowsSideBySide rows, then the next tile of them.
// So data that is read together competes for as few cache lines as possible, for any number of columns. The tiles of a row
// that is multiplied alone follow one another.
constexpr int kRowsSideBySide = 16;
struct RoundedRows {
    const int8_t* codes;
    const float* steps;
    const float* sums;
    int64_t columns;
    int64_t side_by_side;  // number of rows side by side: kRowsSideBySide, or 1
};

// Where the first tile of row i is, in tiles of one row. Its next tile is side_by_side further.
static inline int64_t first_tile_of(const RoundedRows& rows, int64_t i) {
    const int64_t together = rows.side_by_side;
    return i / together * together * (rows.columns / kColumnsPerTile) + i % together;
}

static inline RoundedRows rounded_row(const RoundedRows& rows, int64_t i) {
    const int64_t place = first_tile_of(rows, i);
    return {rows.codes + place * kColumnsPerTile, rows.steps + place, rows.sums + place, rows.columns, rows.side_by_side};
}

struct BfloatRows;
// `blocks` row blocks of a bfloat16 matrix times `count` <= 96 rows, beginning with `first`, a multiple of 16.
// acc: [blocks, count, 16], written.
using MultiplyBfloats = void (*)(const MatrixView&, int64_t block, int blocks, const BfloatRows& x, int64_t first, int count,
                                 float* acc);

// Rows of activations rounded to bfloat16 (kernels_avx512bf16.cpp), and the product that reads them. Their order is that
// of RoundedRows: one tile of 32 values of kRowsSideBySide rows, then the next tile of them. Values and rows that are missing
// in the last tile and in the last group of rows are zeros.
struct BfloatRows {
    const uint16_t* values;  // null: bfloat16 matrices read floats
    int64_t columns;
    int64_t side_by_side;  // number of rows side by side: kRowsSideBySide, or 1
    MultiplyBfloats multiply;
};

static inline int64_t bfloat_tiles(int64_t columns) {
    return (columns + kColumnsPerTile - 1) / kColumnsPerTile;
}

// Where the first value of row i is. Its next tile is side_by_side * kColumnsPerTile values further.
static inline int64_t first_value_of(const BfloatRows& rows, int64_t i) {
    const int64_t together = rows.side_by_side;
    return (i / together * together * bfloat_tiles(rows.columns) + i % together) * kColumnsPerTile;
}

static inline BfloatRows bfloat_row(const BfloatRows& rows, int64_t i) {
    return {rows.values + first_value_of(rows, i), rows.columns, rows.side_by_side, rows.multiply};
}

// The same rows in three forms: floats for 16-bit matrices, rounded rows for quantized ones, and rows of bfloat16 for bfloat16
// matrices of experts that read them. A form that no matrix reads may be null.
struct Activations {
    InputRows floats;
    RoundedRows rounded;
    BfloatRows bfloats;
};

// kRelu has no gate: the hidden values of the expert are max(up x, 0).
enum class Activation { kSilu = 0, kClampedSwiglu = 1, kRelu = 2, kGelu = 3 };

// How the products of gate and up are combined. Biases are added first.
struct Gating {
    Activation activation;
    float limit;             // of kClampedSwiglu
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
    const float* sinks;  // [H], an additional score of each softmax, without a value; may be null
    const int32_t* ends;  // [T], end of the positions that a token sees; null: its own position + 1
    const float* bias;    // [H, 2 C - 1], added to the score of position j at index C - 1 + j - own position; may be null
};

// Features of the values whose states lie together: one line of the processor's cache. A state is [Dv / 16, Dk, 16] per head.
constexpr int kStateColumns = 16;

// Gated delta rule: S = decay S + k (rate (v - decay k S)); out = q S.
struct DeltaCall {
    const float* q;  // [T, Hk, Dk]
    const float* k;
    const float* v;      // [T, Hv, Dv]
    const float* decay;  // [T, Hv]
    const float* rate;
    float* out;  // [T, Hv, Dv]
    int64_t key_heads, value_heads, key_size, value_size;
};

struct RopeCall {
    float* x;                  // [T, H, Dh]
    const float* cos;          // [C, half]
    const float* sin;          // [C, half]
    const int32_t* positions;  // [T]
    int64_t heads, head_size, half;
    bool is_interleaved;  // pairs are adjacent features; they are first moved into halves and stay there
};

struct RouteCall {
    const float* logits;  // [T, E]
    int32_t* experts;     // [T, K]
    float* weights;       // [T, K]
    int64_t expert_count, top_k;
    bool renormalizes;
};

// Matrices of a quantizer are stored column by column: [K, N] is K columns of N rows of weights. Columns have G groups of equal
// size. A code stands for scale * code + minimum; scales and minima are [G, N].

constexpr int kMaxRanges = 16;
constexpr int kMaxRoundedColumns = 64;

// Search for the range of each group.
struct RangesCall {
    const float* weights;     // [K, N]
    const float* importance;  // [K], weights of the columns
    const float* factors;     // [range_count], smaller ranges over the whole one
    float* scratch;           // [2, K / G, 8] for three values, whose best range is tried instead, with range_count 1; else null
    float* scales;            // [G, N], values of float16, infinite or NaN if it does not hold the range
    float* minima;
    int64_t columns, groups, rows, range_count;
    float largest, centre;  // the largest code, and the code of zero of symmetric formats
    bool is_symmetric;
};

// Weights and grids of their groups.
struct GridCall {
    const float* weights;  // [K, N]
    const float *scales, *minima;
    int64_t columns, groups, rows;
};

// sums[j, i] = sum over k in group j of products[k, i] (codes[k, i] - centre).
struct SumsCall {
    const float* products;  // [K, N]
    const uint8_t* codes;   // [K, N]
    float* sums;            // [G, N]
    int64_t groups, width, rows;
    float centre;
};

// Columns [begin, end) of GPTQ, at most kMaxRoundedColumns. See compiler/quantization/quantizers/gptq.py.
struct ColumnsCall {
    float* work;                              // [K, N] in GPTQ's order: weights, then errors over the diagonal of the factor
    const float* factor;                      // U^T, [K, K]
    const int64_t* order;                     // [K], the column of the weights
    const float *scales, *inverses, *minima;  // [G, N]; inverses: 1 / scale
    const uint8_t* largest;                   // [N], the largest code
    uint8_t* codes;                           // [K, N] in the order of the weights
    double* squares;                          // [N], to which the squares of the errors are added
    int64_t columns, groups, rows, begin, end;
};

// `count` symmetric matrices S, [P, P, count]. Only entries on and above the diagonal are read.
struct SystemsCall {
    const float* systems;
    int64_t size, count;  // P, and the number of systems
};

// Least squares of the scales, and minima, that belong to codes: systems S of some rows, size P = G, or 2 G with minima.
// With C for a code minus the centre, entries on and above the diagonal of the first G rows are written:
// S[i, j] = sum over k in group i and l in group j of C_k H[k, l] C_l, and S[i, G + j] = sum over k in i of C_k sums[j, k].
struct CodeSystemsCall {
    const uint8_t* codes;  // [K, rows], columns are `distance` bytes apart
    const float* moment;   // H, [K, K], symmetric
    const float* sums;     // [G, K], sums of H over groups of rows; not read if P = G
    float* systems;        // [P, P, rows]
    float* scratch;        // [K, kSystemTile]
    int64_t columns, groups, rows, distance, size;
    float centre;
};
constexpr int kSystemTile = 96;

// The kernels of one instruction set. They validate nothing, allocate nothing and cannot fail.
struct KernelTable {
    const char* name;
    bool (*is_supported)();
    // Row blocks [begin, end) of out = x W^T, for `tokens` rows.
    void (*linear)(const MatrixView&, const Activations& x, int64_t tokens, OutputRows out, int64_t begin, int64_t end);
    // Row blocks [begin, end) of the gated products, for example silu(gate x) * (up x). `gate` is not read with kRelu.
    void (*expert_hidden)(const MatrixView& gate, const MatrixView& up, const Gating& gating, const Activations& x,
                          int64_t tokens, OutputRows out, int64_t begin, int64_t end);
    // One row rounded to 8 bits: [columns / 32] tiles of 32 codes, steps and sums, each `distance` tiles from the next.
    void (*round_row)(const float* x, int64_t columns, int8_t* codes, float* steps, float* sums, int64_t distance);
    void (*dequantize_row)(const MatrixView&, int64_t row, float* out);
    void (*combine)(const float* parts, const float* weights, int64_t top_k, int64_t size, float* out);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t size, float* out);
    void (*rope)(const RopeCall&, int64_t token);
    // scores: [queries, stride], stride >= positions.
    void (*attention)(const AttentionCall&, const AttentionPart&, float* scores, int64_t stride);
    // One token: rows of K tokens up to it, oldest first; taps: [K, size].
    void (*convolve)(const float* const* rows, const float* taps, int64_t count, int64_t size, float* out);
    // Tokens [first, last) of one sequence; at least one. state: [Dk, kStateColumns].
    void (*delta_rule)(const DeltaCall&, int64_t head, int64_t block, int64_t first, int64_t last, float* state);
    void (*route)(const RouteCall&, int64_t token, float* shares);  // shares: [E]
    void (*exp)(const float* x, int64_t size, float* out);
    void (*silu)(const float* x, int64_t size, float* out);  // x / (1 + exp(-x)); out may be x
    void (*search_ranges)(const RangesCall&);
    void (*nearest_codes)(const GridCall&, float largest, uint8_t* codes);
    // codes: [K, N]. out: [K, N], may be null; column k is stored in places[k]. squares: of each row, [N].
    void (*differences)(const GridCall&, const uint8_t* codes, const int64_t* places, float* out, double* squares);
    void (*code_sums)(const SumsCall&);
    void (*round_columns)(const ColumnsCall&);
    void (*code_systems)(const CodeSystemsCall&);
    void (*multiply_systems)(const SystemsCall&, const float* x, float* out);  // S x; both [P, count]
    // Replaces right by x with (S + diagonal) x = right; both [P, count]. scratch: [2, P, P, 8].
    void (*solve_systems)(const SystemsCall&, const float* diagonal, float* right, float* scratch);
};

// The kernels in which one instruction set differs from another; it shares the rest.
struct ProductKernels {
    bool (*is_supported)();
    decltype(KernelTable::linear) linear;
    decltype(KernelTable::expert_hidden) expert_hidden;
};

// Products of bfloat16 matrices with activations rounded to bfloat16. Their sums have an order of their own, so their bits are
// not those of the tables.
struct BfloatKernels {
    const char* name;
    bool (*is_supported)();
    // One row rounded to bfloat16: tiles of 32 values, `distance` tiles from each other.
    void (*round_row)(const float* x, int64_t columns, uint16_t* values, int64_t distance);
    MultiplyBfloats multiply;
};

const KernelTable& scalar_kernels();
// Null if the file of the instruction set compiled to nothing.
const KernelTable* avx2_kernels();
const KernelTable* avxvnni_kernels();
const KernelTable* avx512vnni_kernels();
const ProductKernels* amx_products();
const KernelTable* neon_kernels();
const KernelTable* neon_dot_kernels();
const KernelTable* neon_i8mm_kernels();
const BfloatKernels* avx512bf16_kernels();
const BfloatKernels* amx_bf16_kernels();

// Which instruction sets the processor and the operating system support (detect.cpp).
// AVX2, FMA and F16C, and the operating system saves the wide registers.
bool has_avx2();
// has_avx2() and the dot product of bytes on registers of 256 bits.
bool has_avxvnni();
// has_avx2() and AVX-512 F, BW, VL and its dot product of bytes.
bool has_avx512vnni();
// has_avx512vnni() and the dot product of pairs of bfloat16.
bool has_avx512bf16();
// has_avx512vnni() and AMX with products of bytes. The first call asks the operating system for the tile registers, for all
// threads.
bool has_amx();
// has_amx(), has_avx512bf16() and AMX with products of bfloat16.
bool has_amx_bf16();
// AArch64.
bool has_neon();
bool has_neon_dot();
// has_neon_dot() and the matrix products of bytes.
bool has_neon_i8mm();

constexpr int kMaxTables = 8;

// Fill `tables` with the supported tables, best first. Returns their number.
int supported_kernels(const KernelTable* tables[kMaxTables]);

const KernelTable& active_kernels();

// The products with bfloat16 activations that belong to the active kernels; null if they have none.
const BfloatKernels* active_bfloat_kernels();

// Returns false, without a change, if no supported table has this name.
bool select_kernels(const char* name);

}  // namespace moec
