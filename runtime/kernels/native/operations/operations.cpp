// Products of matrices, split over threads by row blocks. Products of experts: expert_operations.cpp. Operations that are split by
// tokens: row_operations.cpp.
// A split never changes a result: one thread computes each output value, in an order that depends only on its own inputs.
// The scratch of a product is at most 96 x 1.25 K bytes, and 2 bytes more per K with rows of bfloat16.

#include "operations/operations.h"

#include <algorithm>

#include "operations/activation_forms.h"
#include "operations/split_work.h"

namespace moec {
namespace {

// body(matrix, begin, end) over parts of the row blocks of all matrices, numbered through.
template <class Body>
void split_matrices(const MatrixView* const* matrices, int64_t count, int64_t tokens, const Body& body) {
    int64_t blocks = 0;
    double flops = 0;
    for (int64_t i = 0; i < count; ++i) {
        blocks += blocks_of(*matrices[i]);
        flops += product_flops(*matrices[i], tokens);
    }
    split_blocks(blocks, flops, [&](int64_t begin, int64_t end) {
        int64_t first = 0;  // number of the first block of matrix i
        for (int64_t i = 0; i < count; ++i) {
            const int64_t last = first + blocks_of(*matrices[i]);
            if (begin < last && end > first) {
                body(i, std::max(begin, first) - first, std::min(end, last) - first);
            }
            first = last;
        }
    });
}

}  // namespace

bool linear_of_bfloats(const BfloatKernels& kernels, const MatrixView& matrix, const float* x, int64_t tokens, float* out) {
    const int64_t columns = matrix.columns, at_once = std::min(tokens, kTokensAtOnce);
    const Forms forms{false, &kernels};
    float* memory = operation_scratch.take(form_floats(Used::kTogether, forms, at_once, columns));
    if (memory == nullptr && tokens > 0) {
        return false;
    }
    const MatrixView* const matrices[] = {&matrix};
    for (int64_t first = 0; first < tokens; first += at_once) {
        const int64_t now = std::min(tokens - first, at_once);
        const Activations inputs =
            make_forms(Used::kTogether, forms, {x + first * columns, columns, nullptr}, now, columns, memory);
        split_matrices(matrices, 1, now, [&](int64_t, int64_t begin, int64_t end) {
            active_kernels().linear(matrix, inputs, now, {out + first * matrix.rows, matrix.rows, nullptr}, begin, end);
        });
    }
    return true;
}

bool linears(const MatrixView* const* matrices, int64_t count, const float* x, int64_t tokens, float* const* outs) {
    const KernelTable& kernels = active_kernels();
    const int64_t columns = matrices[0]->columns, at_once = std::min(tokens, kTokensAtOnce);
    const bool rounds =
        std::any_of(matrices, matrices + count, [](const MatrixView* matrix) { return matrix->bitwidth != 16; });
    float* memory = rounds ? operation_scratch.take(rounded_floats(Used::kTogether, at_once, columns)) : nullptr;
    if (rounds && memory == nullptr && tokens > 0) {
        return false;
    }
    // Only the rounded copies are limited to kTokensAtOnce tokens. Without a quantized matrix all tokens are taken at once.
    const int64_t step = rounds ? at_once : tokens;
    for (int64_t first = 0; first < tokens; first += step) {
        const int64_t now = std::min(tokens - first, step);
        Activations inputs{{x + first * columns, columns, nullptr}, {}, {}};
        if (rounds) {
            inputs.rounded = round_rows(Used::kTogether, inputs.floats, now, columns, memory);
        }
        split_matrices(matrices, count, now, [&](int64_t i, int64_t begin, int64_t end) {
            const OutputRows outputs{outs[i] + first * matrices[i]->rows, matrices[i]->rows, nullptr};
            kernels.linear(*matrices[i], inputs, now, outputs, begin, end);
        });
    }
    return true;
}

bool linears_by_row(const MatrixView* const* matrices, int64_t count, const float* x, float* const* outs) {
    const KernelTable& kernels = active_kernels();
    const int64_t columns = matrices[0]->columns;
    const bool rounds =
        std::any_of(matrices, matrices + count, [](const MatrixView* matrix) { return matrix->bitwidth != 16; });
    RoundedRows rounded{};
    if (rounds) {
        float* memory = operation_scratch.take(rounded_floats(Used::kAlone, count, columns));
        if (memory == nullptr) {
            return false;
        }
        rounded = round_rows(Used::kAlone, {x, columns, nullptr}, count, columns, memory);
    }
    split_matrices(matrices, count, 1, [&](int64_t i, int64_t begin, int64_t end) {
        Activations inputs{{x + i * columns, columns, nullptr}, {}, {}};
        if (rounds) {
            inputs.rounded = rounded_row(rounded, i);
        }
        kernels.linear(*matrices[i], inputs, 1, {outs[i], matrices[i]->rows, nullptr}, begin, end);
    });
    return true;
}

void dequantize_rows(const MatrixView& matrix, const int64_t* rows, int64_t count, float* out) {
    const KernelTable& kernels = active_kernels();
    const double flops = 2.0 * kRowsPerBlock * static_cast<double>(matrix.columns) * static_cast<double>(count);
    split_tokens(count, threads_for(flops), [&](int64_t first, int64_t last, int) {
        for (int64_t i = first; i < last; ++i) {
            kernels.dequantize_row(matrix, rows[i], out + i * matrix.columns);
        }
    });
}

}  // namespace moec
