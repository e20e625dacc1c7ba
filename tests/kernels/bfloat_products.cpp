// Multiplies a bfloat16 matrix with activations rounded to bfloat16, without Python and with emulated instructions.
//
// Arguments: name of the kernels, rows, columns, and up to 96 tokens. Standard input: the packed matrix, then the activations
// as floats. Standard output: the products as floats, [tokens, rows].

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "targets/kernel_table.h"

using namespace moec;

template <class Value>
void read_all(std::vector<Value>& values) {
    if (std::fread(values.data(), sizeof(Value), values.size(), stdin) != values.size()) {
        std::exit(2);
    }
}

int main(int argc, char** argv) {
    if (argc != 5) {
        return 2;
    }
    const int64_t rows = std::atol(argv[2]), columns = std::atol(argv[3]), tokens = std::atol(argv[4]);
    const BfloatKernels& kernels = *(std::strcmp(argv[1], "amx-bf16") == 0 ? amx_bf16_kernels() : avx512bf16_kernels());
    MatrixView matrix{nullptr, rows, columns, 0, 16, false, FloatType::kBfloat16, false};
    std::vector<uint8_t> bytes(static_cast<size_t>(packed_bytes(matrix)));
    std::vector<float> x(static_cast<size_t>(tokens * columns));
    read_all(bytes);
    read_all(x);
    matrix.data = bytes.data();
    const int64_t together = tokens == 1 ? 1 : kRowsSideBySide, groups = (tokens + together - 1) / together;
    std::vector<uint16_t> values(static_cast<size_t>(groups * together * bfloat_tiles(columns) * kColumnsPerTile));
    const BfloatRows inputs{values.data(), columns, together, kernels.multiply};
    for (int64_t t = 0; t < tokens; ++t) {
        kernels.round_row(x.data() + t * columns, columns, values.data() + first_value_of(inputs, t), together);
    }
    const int blocks = static_cast<int>(blocks_of(matrix));
    std::vector<float> acc(static_cast<size_t>(blocks * tokens * kRowsPerBlock));
    kernels.multiply(matrix, 0, blocks, inputs, 0, static_cast<int>(tokens), acc.data());
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t place = (row / kRowsPerBlock * tokens + t) * kRowsPerBlock + row % kRowsPerBlock;
            std::fwrite(&acc[static_cast<size_t>(place)], sizeof(float), 1, stdout);
        }
    }
    return 0;
}
