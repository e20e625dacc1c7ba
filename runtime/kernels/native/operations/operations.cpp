// Products of matrices and experts, split over threads by row blocks. Operations that are split by tokens: row_operations.cpp.
// A split never changes a result: one thread computes each output value, in an order that depends only on its own inputs.
// The scratch of a product is at most 96 x (1.25 K + 5.25 F) bytes, and 2 bytes more per K and F with rows of bfloat16.

#include "operations/operations.h"

#include <algorithm>
#include <cstring>

#include "operations/split_work.h"

namespace moec {
namespace {

constexpr double kFlopsPerPart = 4e6;  // largest part of a long product, about 10 us
// At the end of an operation, a thread waits for half a part on average.
constexpr int64_t kPartsPerExpert = 4;
constexpr int64_t kBlocksPerUnit = 2;  // products over one token take two blocks at a time
constexpr int64_t kTokensAtOnce = 96;  // tokens whose rounded and hidden values are kept at once
constexpr double kFlopsPerRounded = 8;

// body(begin, end) over parts of the row blocks of a matrix.
template <class Body>
void split_blocks(int64_t blocks, double flops, const Body& body) {
    const int threads = threads_for(flops);
    const int64_t units = (blocks + kBlocksPerUnit - 1) / kBlocksPerUnit;
    const int64_t wanted = std::max(threads * kPartsPerThread, static_cast<int64_t>(flops / kFlopsPerPart));
    const int64_t parts = threads == 1 ? 1 : std::min(units, wanted);
    parallel_for(parts, threads, [&](int64_t part, int) {
        const int64_t begin = part * units / parts * kBlocksPerUnit;
        const int64_t end = std::min(blocks, (part + 1) * units / parts * kBlocksPerUnit);
        body(begin, end);
    });
}

// body(expert, begin, end) over parts of the row blocks of several matrices of one size.
template <class Body>
void split_experts(int64_t count, int64_t blocks, double flops, const Body& body) {
    const int threads = threads_for(flops);
    const int64_t units = (blocks + kBlocksPerUnit - 1) / kBlocksPerUnit;
    const int64_t parts = threads == 1 ? 1 : std::min(units, kPartsPerExpert);
    parallel_for(count * parts, threads, [&](int64_t item, int) {
        const int64_t part = item % parts;
        body(item / parts, part * units / parts * kBlocksPerUnit,
             std::min(blocks, (part + 1) * units / parts * kBlocksPerUnit));
    });
}

double product_flops(const MatrixView& matrix, int64_t tokens) {
    return 2.0 * static_cast<double>(matrix.rows) * static_cast<double>(matrix.columns) * static_cast<double>(tokens);
}

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

// How rounded rows are multiplied: each with a matrix of its own, or all with the same matrix.
enum class Used { kAlone, kTogether };

int64_t rows_side_by_side(Used used, int64_t rows) {
    return used == Used::kAlone || rows == 1 ? 1 : kRowsSideBySide;
}

int64_t rounded_tiles(Used used, int64_t rows, int64_t columns) {
    const int64_t together = rows_side_by_side(used, rows);
    return (rows + together - 1) / together * together * (columns / kColumnsPerTile);
}

// Number of floats that hold `rows` rounded rows: a byte per column and two floats per tile.
int64_t rounded_floats(Used used, int64_t rows, int64_t columns) {
    return rounded_tiles(used, rows, columns) * (kColumnsPerTile / int64_t{sizeof(float)} + 2);
}

RoundedRows round_rows(Used used, const InputRows& x, int64_t tokens, int64_t columns, float* memory) {
    const KernelTable& kernels = active_kernels();
    const int64_t tiles = rounded_tiles(used, tokens, columns);
    int8_t* codes = reinterpret_cast<int8_t*>(memory);
    float* steps = memory + tiles * (kColumnsPerTile / int64_t{sizeof(float)});
    float* sums = steps + tiles;
    const RoundedRows rows{codes, steps, sums, columns, rows_side_by_side(used, tokens)};
    split_tokens(tokens, threads_for(kFlopsPerRounded * static_cast<double>(tokens) * static_cast<double>(columns)),
                 [&](int64_t first, int64_t last, int) {
                     for (int64_t t = first; t < last; ++t) {
                         const float* row = x.base + (x.index != nullptr ? x.index[t] : t) * x.stride;
                         const int64_t place = first_tile_of(rows, t);
                         kernels.round_row(row, columns, codes + place * kColumnsPerTile, steps + place, sums + place,
                                           rows.side_by_side);
                     }
                 });
    return rows;
}

// The forms in which the matrices of an expert read their inputs, besides floats.
struct Forms {
    bool has_rounded;              // a matrix is quantized
    const BfloatKernels* bfloats;  // not null: a matrix of bfloat16 reads rows of bfloat16
};

Forms forms_of(const ExpertView& expert, const MatrixView& matrix) {
    return {matrix.bitwidth != 16, matrix.float_type == FloatType::kBfloat16 ? expert.bfloats : nullptr};
}

Forms both(const Forms& a, const Forms& b) {
    return {a.has_rounded || b.has_rounded, a.bfloats != nullptr ? a.bfloats : b.bfloats};
}

// Number of floats that hold `rows` rows of bfloat16.
int64_t bfloat_floats(Used used, int64_t rows, int64_t columns) {
    const int64_t together = rows_side_by_side(used, rows), tile_floats = kColumnsPerTile * int64_t{sizeof(uint16_t)} / int64_t{sizeof(float)};
    return (rows + together - 1) / together * together * bfloat_tiles(columns) * tile_floats;
}

BfloatRows bfloat_rows(Used used, const BfloatKernels& kernels, const InputRows& x, int64_t tokens, int64_t columns,
                       float* memory) {
    uint16_t* values = reinterpret_cast<uint16_t*>(memory);
    const BfloatRows rows{values, columns, rows_side_by_side(used, tokens), kernels.multiply};
    if (tokens % rows.side_by_side != 0) {  // the rows that are missing in the last group
        std::memset(static_cast<void*>(memory), 0, static_cast<size_t>(bfloat_floats(used, tokens, columns)) * sizeof(float));
    }
    split_tokens(tokens, threads_for(kFlopsPerRounded * static_cast<double>(tokens) * static_cast<double>(columns)),
                 [&](int64_t first, int64_t last, int) {
                     for (int64_t t = first; t < last; ++t) {
                         const float* row = x.base + (x.index != nullptr ? x.index[t] : t) * x.stride;
                         kernels.round_row(row, columns, values + first_value_of(rows, t), rows.side_by_side);
                     }
                 });
    return rows;
}

int64_t form_floats(Used used, const Forms& forms, int64_t rows, int64_t columns) {
    return (forms.has_rounded ? rounded_floats(used, rows, columns) : 0) +
           (forms.bfloats != nullptr ? bfloat_floats(used, rows, columns) : 0);
}

// The rows in all forms. memory: form_floats.
Activations make_forms(Used used, const Forms& forms, const InputRows& x, int64_t tokens, int64_t columns, float* memory) {
    Activations found{x, {}, {}};
    if (forms.has_rounded) {
        found.rounded = round_rows(used, x, tokens, columns, memory);
        memory += rounded_floats(used, tokens, columns);
    }
    if (forms.bfloats != nullptr) {
        found.bfloats = bfloat_rows(used, *forms.bfloats, x, tokens, columns, memory);
    }
    return found;
}

// Row i of rows that are used alone, in the same forms.
Activations row_of(const Activations& rows, const Forms& forms, int64_t i) {
    Activations found{{rows.floats.base + i * rows.floats.stride, rows.floats.stride, nullptr}, {}, {}};
    if (forms.has_rounded) {
        found.rounded = rounded_row(rows.rounded, i);
    }
    if (forms.bfloats != nullptr) {
        found.bfloats = bfloat_row(rows.bfloats, i);
    }
    return found;
}

// The forms that an expert reads: without rows of bfloat16, if only other experts of a call read them.
Activations read_by(const ExpertView& expert, Activations x) {
    if (expert.bfloats == nullptr) {
        x.bfloats = {};
    }
    return x;
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

// Adds the bias of the down projection to row blocks [begin, end) of its outputs.
static void add_bias(const ExpertView& expert, int64_t tokens, const OutputRows& out, int64_t begin, int64_t end) {
    if (expert.down_bias == nullptr) {
        return;
    }
    const int64_t last = std::min(end * kRowsPerBlock, expert.down.rows);
    for (int64_t t = 0; t < tokens; ++t) {
        float* row = out.base + (out.index != nullptr ? out.index[t] : t) * out.stride;
        for (int64_t d = begin * kRowsPerBlock; d < last; ++d) {
            row[d] += expert.down_bias[d];
        }
    }
}

bool expert_ffn(const ExpertView& expert, const ExpertCall& call) {
    const KernelTable& kernels = active_kernels();
    const int64_t size = expert.gate.columns, width = expert.gate.rows;
    const Forms input = both(forms_of(expert, expert.gate), forms_of(expert, expert.up)), inner = forms_of(expert, expert.down);
    const int64_t at_once = std::min(call.count, kTokensAtOnce);
    const int64_t input_floats = form_floats(Used::kTogether, input, at_once, size);
    const int64_t hidden_floats = form_floats(Used::kTogether, inner, at_once, width);
    float* input_memory = operation_scratch.take(input_floats + hidden_floats + at_once * width);
    if (input_memory == nullptr && call.count > 0) {
        return false;
    }
    float* hidden_memory = input_memory + input_floats;
    float* hidden = hidden_memory + hidden_floats;
    for (int64_t first = 0; first < call.count; first += kTokensAtOnce) {
        const int64_t tokens = std::min(call.count - first, kTokensAtOnce);
        const Activations inputs =
            make_forms(Used::kTogether, input, {call.x, size, call.x_rows + first}, tokens, size, input_memory);
        const OutputRows hidden_rows{hidden, width, nullptr};
        split_blocks(blocks_of(expert.gate), 2 * product_flops(expert.gate, tokens), [&](int64_t begin, int64_t end) {
            kernels.expert_hidden(expert.gate, expert.up, expert.gating, inputs, tokens, hidden_rows, begin, end);
        });
        const Activations hidden_inputs =
            make_forms(Used::kTogether, inner, {hidden, width, nullptr}, tokens, width, hidden_memory);
        const OutputRows outputs{call.out, expert.down.rows, call.out_rows + first};
        split_blocks(blocks_of(expert.down), product_flops(expert.down, tokens), [&](int64_t begin, int64_t end) {
            kernels.linear(expert.down, hidden_inputs, tokens, outputs, begin, end);
            add_bias(expert, tokens, outputs, begin, end);
        });
    }
    return true;
}

bool experts_of_token(const ExpertView* const* experts, int64_t count, const float* x, const int64_t* out_rows, float* out) {
    if (count == 0) {
        return true;
    }
    const KernelTable& kernels = active_kernels();
    const MatrixView& first = experts[0]->gate;
    const int64_t size = first.columns, width = first.rows;
    Forms input{}, inner{};
    double flops = 0;
    for (int64_t i = 0; i < count; ++i) {
        const ExpertView& expert = *experts[i];
        input = both(input, both(forms_of(expert, expert.gate), forms_of(expert, expert.up)));
        inner = both(inner, forms_of(expert, expert.down));
        flops += product_flops(first, 1);
    }
    const int64_t input_floats = form_floats(Used::kAlone, input, 1, size);
    const int64_t hidden_floats = form_floats(Used::kAlone, inner, count, width);
    float* input_memory = operation_scratch.take(input_floats + hidden_floats + count * width);
    if (input_memory == nullptr) {
        return false;
    }
    float* hidden_memory = input_memory + input_floats;
    float* hidden = hidden_memory + hidden_floats;
    const Activations inputs = make_forms(Used::kAlone, input, {x, size, nullptr}, 1, size, input_memory);
    split_experts(count, blocks_of(first), 2 * flops, [&](int64_t i, int64_t begin, int64_t end) {
        kernels.expert_hidden(experts[i]->gate, experts[i]->up, experts[i]->gating, read_by(*experts[i], inputs), 1,
                              {hidden + i * width, width, nullptr}, begin, end);
    });
    const Activations hidden_inputs = make_forms(Used::kAlone, inner, {hidden, width, nullptr}, count, width, hidden_memory);
    split_experts(count, blocks_of(experts[0]->down), flops, [&](int64_t i, int64_t begin, int64_t end) {
        const Activations own = read_by(*experts[i], row_of(hidden_inputs, inner, i));
        const OutputRows outputs{out + out_rows[i] * size, size, nullptr};
        kernels.linear(experts[i]->down, own, 1, outputs, begin, end);
        add_bias(*experts[i], 1, outputs, begin, end);
    });
    return true;
}

}  // namespace moec
