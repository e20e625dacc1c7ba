// Start here to follow a product: `linear` is the kernel `linear` of each table in targets/kernel_table.h. It takes 16-bit
// matrices (products/linear.h) and quantized ones (products/quantized.h), and stores the results. This file has no include
// guard: each targets/kernels_*.cpp includes it inside its own namespace, after products/quantized.h.

// Store the first `rows` <= 16 lanes of acc.
inline void store_rows(float* out, const float* acc, int64_t rows) {
    for (int64_t row = 0; row < rows; row += kLanes) {
        const int count = static_cast<int>(rows - row < kLanes ? rows - row : kLanes);
        store_partial(out + row, load(acc + row), count);
    }
}

inline int64_t rows_in_block(const MatrixView& matrix, int64_t block) {
    const int64_t rest = matrix.rows - block * kRowsPerBlock;
    return rest < kRowsPerBlock ? rest : kRowsPerBlock;
}

// Number of row blocks that one step over one token takes, beginning with `block`: 2, or 1 at the end.
inline int blocks_in_step(int64_t block, int64_t end) {
    return end - block >= kPairedBlocks ? kPairedBlocks : 1;
}

// A matrix and the rows that it is multiplied with: floats for a 16-bit matrix, or rows of bfloat16 if there are some and the
// matrix is of bfloat16; rounded rows for a quantized one.
class Product {
  public:
    Product(const MatrixView& matrix, const Activations& x)
        : matrix_(matrix), x_(x), is_rounded_(matrix.bitwidth != 16),
          is_bfloat_(x.bfloats.values != nullptr && matrix.float_type == FloatType::kBfloat16) {
        if (is_rounded_) {
            rounded_ = rounded_format_of(matrix);
        } else {
            float_ = float_format_of(matrix);
        }
    }

    // `blocks` (2 or 1) row blocks times the only row. acc: [blocks, 16], written.
    void multiply_step(int64_t block, int blocks, float* acc) const {
        if (is_rounded_) {
            for (int b = 0; b < blocks; ++b) {
                rounded_.multiply(matrix_, block + b, x_.rounded, acc + b * kRowsPerBlock);
            }
        } else if (is_bfloat_) {
            x_.bfloats.multiply(matrix_, block, blocks, x_.bfloats, 0, 1, acc);
        } else {
            (blocks == kPairedBlocks ? float_.multiply_pair : float_.multiply_single)(matrix_, block, row_of(x_.floats, 0),
                                                                                      acc);
        }
    }

    // `blocks` (kPanelBlocks or 1) row blocks times `count` <= 96 rows, beginning with `first`.
    // acc: [blocks, count, 16], written.
    void multiply_chunk(int64_t block, int blocks, int64_t first, int count, float* acc) const {
        if (is_rounded_) {
            multiply_rounded_blocks(matrix_, rounded_, block, blocks, x_.rounded, first, count, acc);
            return;
        }
        if (is_bfloat_) {
            x_.bfloats.multiply(matrix_, block, blocks, x_.bfloats, first, count, acc);
            return;
        }
        for (int b = 0; b < blocks; ++b) {
            multiply_block(matrix_, float_, block + b, x_.floats, first, count, acc + b * count * kRowsPerBlock);
        }
    }

  private:
    const MatrixView& matrix_;
    const Activations& x_;
    bool is_rounded_, is_bfloat_;
    RoundedFormat rounded_{};
    FloatFormat float_{};
};

// Number of row blocks that one step over several tokens takes, beginning with `block`: kPanelBlocks, or 1 at the end.
inline int blocks_in_panels(int64_t block, int64_t end) {
    return end - block >= kPanelBlocks ? kPanelBlocks : 1;
}

// Row blocks [begin, end) times the only row. Calls take(block, 16 results) for each.
template <class Take>
inline void multiply_one(const Product& product, int64_t begin, int64_t end, const Take& take) {
    alignas(64) float acc[kPairedBlocks * kRowsPerBlock];
    for (int64_t block = begin; block < end; block += kPairedBlocks) {
        const int blocks = blocks_in_step(block, end);
        product.multiply_step(block, blocks, acc);
        for (int b = 0; b < blocks; ++b) {
            take(block + b, acc + b * kRowsPerBlock);
        }
    }
}

inline void linear(const MatrixView& matrix, const Activations& x, int64_t tokens, OutputRows out, int64_t begin, int64_t end) {
    const Product product(matrix, x);
    alignas(64) float acc[kPanelBlocks * kChunkTokens * kRowsPerBlock];
    if (tokens == 1) {
        multiply_one(product, begin, end, [&](int64_t block, const float* rows) {
            store_rows(row_of(out, 0) + block * kRowsPerBlock, rows, rows_in_block(matrix, block));
        });
        return;
    }
    for (int64_t first = 0; first < tokens; first += kChunkTokens) {
        const int count = static_cast<int>(tokens - first < kChunkTokens ? tokens - first : kChunkTokens);
        const PanelSession session(count);
        for (int64_t block = begin; block < end; block += blocks_in_panels(block, end)) {
            const int blocks = blocks_in_panels(block, end);
            product.multiply_chunk(block, blocks, first, count, acc);
            for (int i = 0; i < blocks * count; ++i) {
                const int64_t place = block + i / count;
                store_rows(row_of(out, first + i % count) + place * kRowsPerBlock, acc + i * kRowsPerBlock,
                           rows_in_block(matrix, place));
            }
        }
    }
}

inline void dequantize_row(const MatrixView& matrix, int64_t row, float* out) {
    const DequantizePanel dequantize_panel = panel_of(matrix);
    alignas(64) float panel[kPanelColumns * kRowsPerBlock];
    for (int64_t k = 0; k < matrix.columns; k += kPanelColumns) {
        const int64_t columns = matrix.columns - k < kPanelColumns ? matrix.columns - k : kPanelColumns;
        dequantize_panel(matrix, row / kRowsPerBlock, k, columns, panel);
        for (int64_t i = 0; i < columns; ++i) {
            out[k + i] = panel[i * kRowsPerBlock + row % kRowsPerBlock];
        }
    }
}
