// Compares the instruction sets that the arguments name with the scalar kernels, bit for bit. It needs no Python, so that it
// can run in an emulator. Prints one line per instruction set. Exit status 1: the first difference was printed. Exit status 2:
// a named set does not run here.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "targets/kernel_table.h"

namespace {

using namespace moec;

uint64_t state = 88172645463325252ull;

uint32_t random_bits() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>(state >> 24);
}

bool is_extreme = false;  // then all activations are equal, and all codes are the largest: no sum may overflow

float random_float() { return is_extreme ? 4.0f : static_cast<float>(static_cast<int32_t>(random_bits() % 20001u) - 10000) / 2500.0f; }

std::vector<float> random_floats(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
        value = random_float();
    }
    return values;
}

// Any bytes are valid codes. The high bytes of 16-bit floats stay below 0x3C, so that all floats are finite and small.
std::vector<uint8_t> random_matrix(const MatrixView& matrix) {
    std::vector<uint8_t> bytes(static_cast<size_t>(packed_bytes(matrix)));
    for (size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<uint8_t>(!is_extreme ? random_bits() : matrix.float_type == FloatType::kMxfp4 ? 0x77u : 0xFFu);
    }
    if (matrix.bitwidth == 16) {
        for (size_t i = 1; i < bytes.size(); i += 2) {
            bytes[i] = static_cast<uint8_t>((bytes[i] & 0x80) | (bytes[i] % 0x3C));
        }
        return bytes;
    }
    if (matrix.has_byte_scales) {
        for (size_t i = 0; i < bytes.size(); ++i) {
            if (static_cast<int64_t>(i) % block_bytes(matrix) < block_header_bytes(matrix)) {
                bytes[i] = static_cast<uint8_t>(110 + bytes[i] % 8);
            }
        }
        return bytes;
    }
    const int64_t header = group_header_bytes(matrix), group = group_bytes(matrix);
    if (matrix.float_type == FloatType::kMxfp4) {  // exponents that stay finite
        for (size_t i = 0; i < bytes.size(); ++i) {
            if (static_cast<int64_t>(i) % group < header) {
                bytes[i] = static_cast<uint8_t>(110 + bytes[i] % 16);
            }
        }
        return bytes;
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
        if (static_cast<int64_t>(i) % group < header && i % 2 == 1) {
            bytes[i] = static_cast<uint8_t>((bytes[i] & 0x80) | (bytes[i] % 0x3C));
        }
    }
    return bytes;
}

struct Check {
    const KernelTable& table;
    int64_t compared = 0;

    void equal(const std::vector<float>& expected, const std::vector<float>& found, const std::string& what) {
        compared += static_cast<int64_t>(expected.size());
        for (size_t i = 0; i < expected.size(); ++i) {
            if (std::memcmp(&expected[i], &found[i], sizeof(float)) != 0) {
                std::printf("%s differs from scalar: %s, value %zu: %.9g, expected %.9g\n", table.name, what.c_str(), i,
                            static_cast<double>(found[i]), static_cast<double>(expected[i]));
                std::exit(1);
            }
        }
    }
};

std::string name_of(const MatrixView& m, int64_t tokens) {
    return std::to_string(m.bitwidth) + " bits, groups of " + std::to_string(m.group_size) + (m.is_symmetric ? "s, " : ", ") +
           std::to_string(m.rows) + " x " + std::to_string(m.columns) + ", " + std::to_string(tokens) + " tokens";
}

// x, rounded by one instruction set.
struct Rounded {
    std::vector<int8_t> codes;
    std::vector<float> steps, sums;
    int64_t columns, side_by_side;

    Rounded(const KernelTable& table, const std::vector<float>& x, int64_t tokens, int64_t width) : columns(width) {
        side_by_side = tokens > 1 ? kRowsSideBySide : 1;
        steps.resize(static_cast<size_t>((tokens + side_by_side - 1) / side_by_side * side_by_side * (width / 32)));
        sums.resize(steps.size());
        codes.resize(32 * steps.size());
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t place = first_tile_of(rows(), t);
            table.round_row(x.data() + t * width, width, codes.data() + 32 * place, steps.data() + place, sums.data() + place,
                            side_by_side);
        }
    }

    RoundedRows rows() const { return {codes.data(), steps.data(), sums.data(), columns, side_by_side}; }
    std::vector<float> plain() const {
        std::vector<float> all(steps);
        all.insert(all.end(), sums.begin(), sums.end());
        for (int8_t code : codes) {
            all.push_back(code);
        }
        return all;
    }
};

void check_matrix(Check& check, MatrixView matrix, int64_t tokens) {
    const KernelTable& scalar = scalar_kernels();
    const std::vector<uint8_t> bytes = random_matrix(matrix), others = random_matrix(matrix);
    matrix.data = bytes.data();
    MatrixView other = matrix;
    other.data = others.data();
    const std::vector<float> x = random_floats(tokens * matrix.columns);
    const InputRows floats{x.data(), matrix.columns, nullptr};
    std::vector<float> products[2], hidden[2], clamped[2], cut[2], row[2];
    const std::vector<float> gate_bias = random_floats(matrix.rows), up_bias = random_floats(matrix.rows);
    const Gating gating{Activation::kSilu, 0.0f, nullptr, nullptr};
    const Gating clamping{Activation::kClampedSwiglu, 3.0f, gate_bias.data(), up_bias.data()};
    const KernelTable* tables[2] = {&scalar, &check.table};
    for (int i = 0; i < 2; ++i) {
        Activations inputs{floats, {}, {}};
        Rounded rounded(*tables[i], x, matrix.bitwidth == 16 ? 0 : tokens, matrix.columns);
        inputs.rounded = rounded.rows();
        products[i].assign(static_cast<size_t>(tokens * matrix.rows), -1.0f);
        hidden[i] = products[i];
        tables[i]->linear(matrix, inputs, tokens, {products[i].data(), matrix.rows, nullptr}, 0, blocks_of(matrix));
        tables[i]->expert_hidden(matrix, other, gating, inputs, tokens, {hidden[i].data(), matrix.rows, nullptr}, 0,
                                 blocks_of(matrix));
        clamped[i].assign(hidden[i].size(), -1.0f);
        tables[i]->expert_hidden(matrix, other, clamping, inputs, tokens, {clamped[i].data(), matrix.rows, nullptr}, 0,
                                 blocks_of(matrix));
        cut[i].assign(hidden[i].size(), -1.0f);
        tables[i]->expert_hidden(other, other, {Activation::kRelu, 0.0f, nullptr, nullptr}, inputs, tokens,
                                 {cut[i].data(), matrix.rows, nullptr}, 0, blocks_of(matrix));
        row[i].resize(static_cast<size_t>(matrix.columns));
        tables[i]->dequantize_row(matrix, matrix.rows - 1, row[i].data());
    }
    check.equal(products[0], products[1], "linear, " + name_of(matrix, tokens));
    check.equal(hidden[0], hidden[1], "expert_hidden, " + name_of(matrix, tokens));
    check.equal(clamped[0], clamped[1], "expert_hidden, clamped, " + name_of(matrix, tokens));
    check.equal(cut[0], cut[1], "expert_hidden without a gate, " + name_of(matrix, tokens));
    check.equal(row[0], row[1], "dequantize_row, " + name_of(matrix, tokens));
}

void check_products(Check& check) {
    for (int bitwidth : {2, 3, 4, 5, 6, 8}) {
        for (int64_t group : {int64_t{32}, int64_t{64}, int64_t{0}}) {
            for (bool is_symmetric : {false, true}) {
                for (int64_t columns : {64, 320, 576}) {
                    if (columns == 576 && bitwidth != 4 && bitwidth != 6) {
                        continue;  // a third panel of columns: the loops are the same for every format
                    }
                    for (int64_t rows : {1, 15, 16, 17, 33}) {
                        for (int64_t tokens : {1, 2, 3, 5, 7}) {
                            check_matrix(check,
                                         {nullptr, rows, columns, group, bitwidth, is_symmetric, FloatType::kNone, false},
                                         tokens);
                        }
                    }
                }
            }
        }
    }
    for (int bitwidth : {1, 2, 3, 4, 5}) {
        for (int64_t group : {32, 64}) {
            for (int64_t columns : {64, 320}) {
                for (int64_t rows : {1, 16, 33}) {
                    for (int64_t tokens : {1, 2, 3, 5, 7}) {
                        check_matrix(check, {nullptr, rows, columns, group, bitwidth, false, FloatType::kNone, true}, tokens);
                    }
                }
            }
        }
    }
    // Every number of tokens that is multiplied at once, and whole groups with any rest.
    for (int64_t tokens = 8; tokens <= 33; ++tokens) {
        check_matrix(check, {nullptr, 33, 320, 32, 4, true, FloatType::kNone, false}, tokens);
        check_matrix(check, {nullptr, 33, 320, 64, 3, false, FloatType::kNone, false}, tokens);
    }
    for (int64_t tokens : {1, 3, 4, 6, 8, 12, 17, 19}) {  // groups of every size, in every format
        for (int bitwidth : {1, 2, 3, 4, 5, 6, 8, kTernary}) {
            check_matrix(check, {nullptr, 33, 320, 64, bitwidth, bitwidth == kTernary, FloatType::kNone, false}, tokens);
        }
        for (int bitwidth : {2, 3, 4, 5, 6, 8}) {
            check_matrix(check, {nullptr, 33, 320, 64, bitwidth, true, FloatType::kNone, false}, tokens);
        }
        for (int bitwidth : {1, 2, 3, 4, 5}) {
            check_matrix(check, {nullptr, 33, 320, 64, bitwidth, false, FloatType::kNone, true}, tokens);
        }
        check_matrix(check, {nullptr, 33, 320, 32, 4, false, FloatType::kMxfp4, false}, tokens);
    }
    is_extreme = true;
    for (int64_t tokens : {1, 7, 17}) {
        for (int bitwidth : {1, 2, 3, 4, 5, 6, 8, kTernary}) {
            check_matrix(check, {nullptr, 16, 128, 64, bitwidth, bitwidth == kTernary, FloatType::kNone, false}, tokens);
        }
        check_matrix(check, {nullptr, 16, 128, 32, 4, false, FloatType::kMxfp4, false}, tokens);
    }
    is_extreme = false;
    for (int64_t tokens : {96, 97}) {  // a whole chunk, and one more
        check_matrix(check, {nullptr, 48, 320, 32, 4, true, FloatType::kNone, false}, tokens);
        check_matrix(check, {nullptr, 48, 300, 0, 16, false, FloatType::kBfloat16, false}, tokens);
    }
    for (int64_t group : {int64_t{64}, int64_t{0}}) {
        for (int64_t columns : {64, 192, 320, 576}) {
            for (int64_t rows : {1, 16, 33}) {
                for (int64_t tokens : {1, 2, 3, 5, 7}) {
                    check_matrix(check, {nullptr, rows, columns, group, kTernary, true, FloatType::kNone, false}, tokens);
                    check_matrix(check, {nullptr, rows, columns, group, 1, false, FloatType::kNone, false}, tokens);
                }
            }
        }
    }
    for (FloatType type : {FloatType::kBfloat16, FloatType::kFloat16}) {
        for (int64_t columns : {1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 257, 300}) {
            for (int64_t rows : {1, 16, 31, 48}) {
                for (int64_t tokens : {1, 3, 7, 13}) {
                    check_matrix(check, {nullptr, rows, columns, 0, 16, false, type, false}, tokens);
                }
            }
        }
    }
}

// Numbers that an instruction may treat specially.
std::vector<float> strange_floats(int64_t count) {
    std::vector<float> values = random_floats(count);
    const float strange[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-38f, -1e-42f, 3e38f, 88.0f, -104.0f};
    for (size_t i = 0; i < values.size(); i += 3) {
        values[i] = strange[random_bits() % 10];
    }
    return values;
}

void check_vectors(Check& check) {
    const KernelTable& scalar = scalar_kernels();
    for (int64_t size : {1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 100, 255, 1023}) {
        const std::vector<float> x = random_floats(size), weight = random_floats(size), parts = random_floats(4 * size);
        std::vector<float> expected(static_cast<size_t>(size)), found(expected);
        scalar.rms_norm(x.data(), weight.data(), 1e-5f, size, expected.data());
        check.table.rms_norm(x.data(), weight.data(), 1e-5f, size, found.data());
        check.equal(expected, found, "rms_norm of " + std::to_string(size));
        scalar.layer_norm(x.data(), weight.data(), parts.data(), 1e-5f, size, expected.data());
        check.table.layer_norm(x.data(), weight.data(), parts.data(), 1e-5f, size, found.data());
        check.equal(expected, found, "layer_norm of " + std::to_string(size));
        scalar.exp(x.data(), size, expected.data());
        check.table.exp(x.data(), size, found.data());
        check.equal(expected, found, "exp of " + std::to_string(size));
        scalar.combine(parts.data(), weight.data(), size < 4 ? 1 : 4, size, expected.data());
        check.table.combine(parts.data(), weight.data(), size < 4 ? 1 : 4, size, found.data());
        check.equal(expected, found, "combine of " + std::to_string(size));
    }
    for (int64_t tiles : {1, 2, 9}) {
        for (bool is_strange : {false, true}) {
            const std::vector<float> x = is_strange ? strange_floats(32 * tiles) : random_floats(32 * tiles);
            const Rounded a(scalar, x, 1, 32 * tiles), b(check.table, x, 1, 32 * tiles);
            std::vector<float> wanted = a.plain(), got = b.plain();
            for (size_t i = 0; i < wanted.size(); ++i) {  // any NaN equals any other NaN
                wanted[i] = std::isnan(wanted[i]) ? 0.5f : wanted[i];
                got[i] = std::isnan(got[i]) ? 0.5f : got[i];
            }
            check.equal(wanted, got, "round_row of " + std::to_string(32 * tiles));
        }
    }
}

// Half floats of at most 16 in magnitude, some of them subnormal.
std::vector<uint16_t> random_halves(int64_t count) {
    std::vector<uint16_t> halves(static_cast<size_t>(count));
    for (uint16_t& half : halves) {
        const uint32_t exponent = random_bits() % 16u == 0 ? 0 : 10u + random_bits() % 9u;
        half = static_cast<uint16_t>((random_bits() & 0x83FFu) | exponent << 10);
    }
    return halves;
}

void check_attention(Check& check) {
    constexpr int32_t kContext = 40;
    constexpr int64_t kTokens = 2, kHeads = 4, kKvHeads = 2;
    const KernelTable& scalar = scalar_kernels();
    for (int64_t size : {5, 8, 72, 128}) {
        for (int64_t window : {0, 1, 7, 8}) {
            const bool is_half = window >= 7;
            const std::vector<float> q = random_floats(kTokens * kHeads * size),
                                     keys = random_floats(kKvHeads * kContext * size);
            const std::vector<float> values = random_floats(kKvHeads * kContext * size);
            const std::vector<uint16_t> half_keys = random_halves(kKvHeads * kContext * size),
                                        half_values = random_halves(kKvHeads * kContext * size);
            const void *k_cache = keys.data(), *v_cache = values.data();
            if (is_half) {
                k_cache = half_keys.data();
                v_cache = half_values.data();
            }
            const std::vector<float> sinks = random_floats(kHeads), bias = random_floats(kHeads * (2 * kContext - 1));
            for (int32_t position : {0, 6, 7, 38}) {
                const int32_t slots[kTokens] = {}, positions[kTokens] = {position, position + 1};
                const int32_t ends[kTokens] = {kContext - position, 1};
                std::vector<float> expected(q.size()), found(q.size()), scores(kMaxAttentionQueries * kContext);
                AttentionCall call{q.data(),
                                   k_cache,
                                   v_cache,
                                   is_half,
                                   slots,
                                   positions,
                                   expected.data(),
                                   kHeads,
                                   kKvHeads,
                                   size,
                                   kContext,
                                   window,
                                   0.3f,
                                   position % 2 ? nullptr : sinks.data(),
                                   window == 0 && position > 6 ? ends : nullptr,
                                   position > 6 ? bias.data() : nullptr};
                for (int64_t head = 0; head < kHeads; head += kHeads / kKvHeads) {
                    // The tested set takes all queries that share keys and values at once; scalar takes each alone.
                    call.out = found.data();
                    check.table.attention(call, {0, kTokens, head, kHeads / kKvHeads}, scores.data(), kContext);
                    call.out = expected.data();
                    for (int64_t i = 0; i < kTokens * kHeads / kKvHeads; ++i) {
                        scalar.attention(call, {i % kTokens, 1, head + i / kTokens, 1}, scores.data(), kContext);
                    }
                }
                check.equal(expected, found, "attention of heads of " + std::to_string(size));
            }
        }
        for (int64_t half : {size / 2, int64_t{1}}) {
            std::vector<float> expected = random_floats(kHeads * size), found(expected);
            const std::vector<float> cos = random_floats(3 * half), sin = random_floats(3 * half);
            const int32_t position = 2;
            scalar.rope({expected.data(), cos.data(), sin.data(), &position, kHeads, size, half, false}, 0);
            check.table.rope({found.data(), cos.data(), sin.data(), &position, kHeads, size, half, false}, 0);
            check.equal(expected, found, "rope of heads of " + std::to_string(size));
        }
    }
    for (int64_t experts : {1, 7, 8, 64, 130}) {
        std::vector<float> logits = random_floats(experts), shares(static_cast<size_t>(experts));
        logits[0] = logits[static_cast<size_t>(experts / 2)];  // a tie
        const int64_t top_k = experts < 8 ? 1 : 8;
        const KernelTable* tables[2] = {&scalar, &check.table};
        for (bool renormalizes : {false, true}) {
            std::vector<int32_t> chosen[2];
            std::vector<float> weights[2];
            for (int i = 0; i < 2; ++i) {
                chosen[i].assign(static_cast<size_t>(top_k), -1);
                weights[i].assign(static_cast<size_t>(top_k), -1.0f);
                tables[i]->route(
                    {logits.data(), chosen[i].data(), weights[i].data(), experts, top_k, renormalizes}, 0, shares.data());
                weights[i].insert(weights[i].end(), chosen[i].begin(), chosen[i].end());
            }
            const std::string kind = renormalizes ? "renormalized route over " : "route over ";
            check.equal(weights[0], weights[1], kind + std::to_string(experts));
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const KernelTable* tables[kMaxTables];
    const int count = supported_kernels(tables);
    for (int i = 1; i < argc; ++i) {
        const KernelTable* named = nullptr;
        for (int t = 0; t < count; ++t) {
            named = std::strcmp(tables[t]->name, argv[i]) == 0 ? tables[t] : named;
        }
        if (named == nullptr) {
            std::printf("%s does not run here\n", argv[i]);
            return 2;
        }
        Check check{*named};
        check_products(check);
        check_vectors(check);
        check_attention(check);
        std::printf("%s: %lld values equal to scalar\n", named->name, static_cast<long long>(check.compared));
    }
    return 0;
}
