// Products with activations rounded to bfloat16, by the dot product of pairs of AVX-512 BF16. They serve the kernels of
// AVX-512 VNNI and of AMX; targets/choose_kernels.cpp says when.
//
// Only this file is compiled with AVX-512 BF16 (CMakeLists.txt); elsewhere it compiles to nothing. Every name here must have
// internal linkage: the linker could replace a shared inline function of another file by the one compiled here.

#include "lanes/compilers.h"
#include "targets/kernel_table.h"

#if defined(MOEC_EMULATE_VNNI) || (defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__))

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moec {
namespace avx512bf16 {
namespace {

#include "lanes/unroll.h"
#if defined(MOEC_EMULATE_VNNI)  // for tests on processors without it: loops over sixteen numbers
#include "emulated_bfloat_lanes.h"
#else
#include "lanes/bfloat_lanes.h"
#endif

// - Activation: x' = x to 8 bits, to nearest even. |x' - x| <= |x| / 257, or |x| where |x| < 2^-126.
// - Algebra, per output row and token: acc = 0; for pairs of columns 2 j and 2 j + 1 in order:
//   acc = fma(w_2j+1, x'_2j+1, acc); acc = fma(w_2j, x'_2j, acc). A missing last column counts as zero. Each fma rounds to
//   nearest even and reads and returns subnormal numbers as zeros, whatever the processor's flags say.
// - Bound, for n = K rounded up to even, u = 2^-24, and sums below the largest float:
//   |error| <= n u / (1 - n u) sum |w_k x'_k| + sum |w_k| |x'_k - x_k| + (n + sum |x'_k|) 2^-126.
//   The last term is what subnormal results and weights lose.
// - Accuracy class: the same bits for any batch and any number of threads. Lanes are rows, as in products/linear.h.
// - The specification is runtime/kernels/reference/bfloat_products.py.

constexpr int kBfloatTokens = 8;  // tokens at once: with two row blocks sixteen chains, which hide the latency of add_pairs
constexpr int kBfloatBlocks = 2;
constexpr int kBfloatColumnBytes = 2 * kRowsPerBlock;

// x: `columns` floats. values: of each tile, `distance` tiles apart.
inline void round_row(const float* x, int64_t columns, uint16_t* values, int64_t distance) {
    for (int64_t k = 0; k < bfloat_tiles(columns) * kColumnsPerTile; k += kRowsPerBlock) {
        const int64_t first = k < columns ? k : columns;  // a half of the last tile may be empty
        const int64_t count = columns - first < kRowsPerBlock ? columns - first : kRowsPerBlock;
        round_to_bfloats(x + first, static_cast<int>(count),
                         values + k / kColumnsPerTile * distance * kColumnsPerTile + k % kColumnsPerTile);
    }
}

// Blocks row blocks times Tokens rows that stand side by side. weights: first column of the first block; the blocks are
// `block_distance` bytes apart. x: first tile of the first row. acc: [Blocks, count, 16], the first of Tokens rows written.
template <int Blocks, int Tokens>
void multiply_pairs(const uint8_t* weights, int64_t block_distance, int64_t columns, const uint16_t* x, int64_t tile_distance,
                    int count, float* acc) {
    Sums sum[Blocks][Tokens];
    unroll<Blocks * Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
        sum[decltype(i)::value / Tokens][decltype(i)::value % Tokens] = no_sums();
    });
    const auto add = [&](const Pairs* codes, const uint16_t* inputs) MOEC_INLINE_LAMBDA {
        unroll<Tokens>([&](auto t) MOEC_INLINE_LAMBDA {
            constexpr int T = decltype(t)::value;
            const Pairs input = broadcast_pair(inputs + T * kColumnsPerTile);
            unroll<Blocks>([&](auto b) MOEC_INLINE_LAMBDA {
                constexpr int B = decltype(b)::value;
                sum[B][T] = add_pairs(sum[B][T], codes[B], input);
            });
        });
    };
    for (int64_t k = 0; k + 1 < columns; k += 2, weights += 2 * kBfloatColumnBytes) {
        Pairs codes[Blocks];
        unroll<Blocks>([&](auto b) MOEC_INLINE_LAMBDA {
            codes[decltype(b)::value] = load_columns(weights + decltype(b)::value * block_distance);
        });
        add(codes, x + k / kColumnsPerTile * tile_distance + k % kColumnsPerTile);
    }
    if (columns % 2 != 0) {
        Pairs codes[Blocks];
        unroll<Blocks>([&](auto b) MOEC_INLINE_LAMBDA {
            codes[decltype(b)::value] = load_last_column(weights + decltype(b)::value * block_distance);
        });
        add(codes, x + (columns - 1) / kColumnsPerTile * tile_distance + (columns - 1) % kColumnsPerTile);
    }
    unroll<Blocks * Tokens>([&](auto i) MOEC_INLINE_LAMBDA {
        constexpr int B = decltype(i)::value / Tokens, T = decltype(i)::value % Tokens;
        store_sums(acc + (B * int64_t{count} + T) * kRowsPerBlock, sum[B][T]);
    });
}

using MultiplyPairs = void (*)(const uint8_t*, int64_t, int64_t, const uint16_t*, int64_t, int, float*);

// multiply_pairs for 1 to kBfloatTokens tokens.
struct PairsByTokens {
    MultiplyPairs of[kBfloatTokens + 1];
};

template <int Blocks>
PairsByTokens make_pairs() {
    PairsByTokens found{};
    unroll<kBfloatTokens>([&](auto i) MOEC_INLINE_LAMBDA {
        found.of[decltype(i)::value + 1] = multiply_pairs<Blocks, decltype(i)::value + 1>;
    });
    return found;
}

// See MultiplyBfloats in targets/kernel_table.h.
inline void multiply_bfloats(const MatrixView& matrix, int64_t block, int blocks, const BfloatRows& x, int64_t first, int count,
                             float* acc) {
    const int64_t distance = block_bytes(matrix), tile_distance = x.side_by_side * kColumnsPerTile;
    for (int done = 0; done < blocks;) {
        const bool is_pair = blocks - done >= kBfloatBlocks;
        const PairsByTokens by_tokens = is_pair ? make_pairs<kBfloatBlocks>() : make_pairs<1>();
        const uint8_t* weights = matrix.data + (block + done) * distance;
        for (int token = 0; token < count; token += kBfloatTokens) {
            const int tokens = count - token < kBfloatTokens ? count - token : kBfloatTokens;
            by_tokens.of[tokens](weights, distance, matrix.columns, x.values + first_value_of(x, first + token), tile_distance, count,
                                 acc + (done * int64_t{count} + token) * kRowsPerBlock);
        }
        done += is_pair ? kBfloatBlocks : 1;
    }
}


#if defined(MOEC_EMULATE_VNNI)
constexpr BfloatKernels kKernels{"avx512bf16", has_avx2, round_row, multiply_bfloats};
#else
constexpr BfloatKernels kKernels{"avx512bf16", has_avx512bf16, round_row, multiply_bfloats};
#endif

}  // namespace
}  // namespace avx512bf16

// Called on every x86 processor, so it must run no wide instruction: it returns the address of a constant.
const BfloatKernels* avx512bf16_kernels() {
    return &avx512bf16::kKernels;
}

}  // namespace moec

#else

namespace moec {

const BfloatKernels* avx512bf16_kernels() {
    return nullptr;
}

}  // namespace moec

#endif
