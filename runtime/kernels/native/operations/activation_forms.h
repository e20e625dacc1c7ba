// The forms in which products read their inputs: rows as floats, rounded to 8 bits, and as bfloat16. Used by operations.cpp and
// expert_operations.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "operations/operations.h"
#include "operations/split_work.h"

namespace moec {

constexpr double kFlopsPerRounded = 8;

// How rounded rows are multiplied: each with a matrix of its own, or all with the same matrix.
enum class Used { kAlone, kTogether };

inline int64_t rows_side_by_side(Used used, int64_t rows) {
    return used == Used::kAlone || rows == 1 ? 1 : kRowsSideBySide;
}

inline int64_t rounded_tiles(Used used, int64_t rows, int64_t columns) {
    const int64_t together = rows_side_by_side(used, rows);
    return (rows + together - 1) / together * together * (columns / kColumnsPerTile);
}

// Number of floats that hold `rows` rounded rows: a byte per column and two floats per tile.
inline int64_t rounded_floats(Used used, int64_t rows, int64_t columns) {
    return rounded_tiles(used, rows, columns) * (kColumnsPerTile / int64_t{sizeof(float)} + 2);
}

inline RoundedRows round_rows(Used used, const InputRows& x, int64_t tokens, int64_t columns, float* memory) {
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

inline Forms forms_of(const ExpertView& expert, const MatrixView& matrix) {
    return {matrix.bitwidth != 16, matrix.float_type == FloatType::kBfloat16 ? expert.bfloats : nullptr};
}

inline Forms both(const Forms& a, const Forms& b) {
    return {a.has_rounded || b.has_rounded, a.bfloats != nullptr ? a.bfloats : b.bfloats};
}

// Number of floats that hold `rows` rows of bfloat16.
inline int64_t bfloat_floats(Used used, int64_t rows, int64_t columns) {
    const int64_t together = rows_side_by_side(used, rows), tile_floats = kColumnsPerTile * int64_t{sizeof(uint16_t)} / int64_t{sizeof(float)};
    return (rows + together - 1) / together * together * bfloat_tiles(columns) * tile_floats;
}

inline BfloatRows bfloat_rows(Used used, const BfloatKernels& kernels, const InputRows& x, int64_t tokens, int64_t columns,
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

inline int64_t form_floats(Used used, const Forms& forms, int64_t rows, int64_t columns) {
    return (forms.has_rounded ? rounded_floats(used, rows, columns) : 0) +
           (forms.bfloats != nullptr ? bfloat_floats(used, rows, columns) : 0);
}

// The rows in all forms. memory: form_floats.
inline Activations make_forms(Used used, const Forms& forms, const InputRows& x, int64_t tokens, int64_t columns, float* memory) {
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
inline Activations row_of(const Activations& rows, const Forms& forms, int64_t i) {
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
inline Activations read_by(const ExpertView& expert, Activations x) {
    if (expert.bfloats == nullptr) {
        x.bfloats = {};
    }
    return x;
}

}  // namespace moec
