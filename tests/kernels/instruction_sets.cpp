// Runs the kernels of the instruction sets that the arguments name. Prints a digest of the bits of each result, so that the
// results of two programs can be compared: of scalar kernels here, and of vector kernels in an emulator. All sets get the
// same operands. It needs no Python. Exit status 2: a named set does not run here.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "targets/kernel_table.h"

namespace {

using namespace moec;

constexpr uint64_t kFirstState = 88172645463325252ull;
uint64_t state = kFirstState;

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

// FNV-1a over 32-bit words.
uint64_t digest_of(const std::vector<float>& values) {
    uint64_t digest = 14695981039346656037ull;
    for (const float& value : values) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        digest = (digest ^ bits) * 1099511628211ull;
    }
    return digest;
}

struct Run {
    const KernelTable& table;

    void print(const std::vector<float>& values, const std::string& what) const {
        std::printf("%s\t%s: %016llx\n", table.name, what.c_str(), static_cast<unsigned long long>(digest_of(values)));
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

void run_matrix(const Run& run, MatrixView matrix, int64_t tokens) {
    const KernelTable& table = run.table;
    const std::vector<uint8_t> bytes = random_matrix(matrix), others = random_matrix(matrix);
    matrix.data = bytes.data();
    MatrixView other = matrix;
    other.data = others.data();
    const std::vector<float> x = random_floats(tokens * matrix.columns);
    const std::vector<float> gate_bias = random_floats(matrix.rows), up_bias = random_floats(matrix.rows);
    const Gating gating{Activation::kSilu, 0.0f, nullptr, nullptr};
    const Gating clamping{Activation::kClampedSwiglu, 3.0f, gate_bias.data(), up_bias.data()};
    const Gating cutting{Activation::kRelu, 0.0f, nullptr, nullptr}, smoothing{Activation::kGelu, 0.0f, nullptr, nullptr};
    const Rounded rounded(table, x, matrix.bitwidth == 16 ? 0 : tokens, matrix.columns);
    const Activations inputs{{x.data(), matrix.columns, nullptr}, rounded.rows(), {}};
    const std::string name = name_of(matrix, tokens);
    std::vector<float> found(static_cast<size_t>(tokens * matrix.rows)), row(static_cast<size_t>(matrix.columns));
    const OutputRows out{found.data(), matrix.rows, nullptr};
    const auto printed = [&](const std::string& what, auto compute) {
        std::fill(found.begin(), found.end(), -1.0f);
        compute();
        run.print(found, what + name);
    };
    printed("linear, ", [&] { table.linear(matrix, inputs, tokens, out, 0, blocks_of(matrix)); });
    printed("expert_hidden, ",
            [&] { table.expert_hidden(matrix, other, gating, inputs, tokens, out, 0, blocks_of(matrix)); });
    printed("expert_hidden, clamped, ",
            [&] { table.expert_hidden(matrix, other, clamping, inputs, tokens, out, 0, blocks_of(matrix)); });
    printed("expert_hidden, gelu, ",
            [&] { table.expert_hidden(matrix, other, smoothing, inputs, tokens, out, 0, blocks_of(matrix)); });
    printed("expert_hidden without a gate, ",
            [&] { table.expert_hidden(other, other, cutting, inputs, tokens, out, 0, blocks_of(matrix)); });
    table.dequantize_row(matrix, matrix.rows - 1, row.data());
    run.print(row, "dequantize_row, " + name);
}

void run_products(const Run& run) {
    for (int bitwidth : {2, 3, 4, 5, 6, 8}) {
        for (int64_t group : {int64_t{32}, int64_t{64}, int64_t{0}}) {
            for (bool is_symmetric : {false, true}) {
                for (int64_t columns : {64, 320, 576}) {
                    if (columns == 576 && bitwidth != 4 && bitwidth != 6) {
                        continue;  // a third panel of columns: the loops are the same for every format
                    }
                    for (int64_t rows : {1, 15, 16, 17, 33}) {
                        for (int64_t tokens : {1, 2, 3, 5, 7}) {
                            run_matrix(run,
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
                        run_matrix(run, {nullptr, rows, columns, group, bitwidth, false, FloatType::kNone, true}, tokens);
                    }
                }
            }
        }
    }
    // Every number of tokens that is multiplied at once, and whole groups with any rest.
    for (int64_t tokens = 8; tokens <= 33; ++tokens) {
        run_matrix(run, {nullptr, 33, 320, 32, 4, true, FloatType::kNone, false}, tokens);
        run_matrix(run, {nullptr, 33, 320, 64, 3, false, FloatType::kNone, false}, tokens);
    }
    for (int64_t tokens : {1, 3, 4, 6, 8, 12, 17, 19}) {  // groups of every size, in every format
        for (int bitwidth : {1, 2, 3, 4, 5, 6, 8, kTernary}) {
            run_matrix(run, {nullptr, 33, 320, 64, bitwidth, bitwidth == kTernary, FloatType::kNone, false}, tokens);
        }
        for (int bitwidth : {2, 3, 4, 5, 6, 8}) {
            run_matrix(run, {nullptr, 33, 320, 64, bitwidth, true, FloatType::kNone, false}, tokens);
        }
        for (int bitwidth : {1, 2, 3, 4, 5}) {
            run_matrix(run, {nullptr, 33, 320, 64, bitwidth, false, FloatType::kNone, true}, tokens);
        }
        run_matrix(run, {nullptr, 33, 320, 32, 4, false, FloatType::kMxfp4, false}, tokens);
    }
    is_extreme = true;
    for (int64_t tokens : {1, 7, 17}) {
        for (int bitwidth : {1, 2, 3, 4, 5, 6, 8, kTernary}) {
            run_matrix(run, {nullptr, 16, 128, 64, bitwidth, bitwidth == kTernary, FloatType::kNone, false}, tokens);
        }
        run_matrix(run, {nullptr, 16, 128, 32, 4, false, FloatType::kMxfp4, false}, tokens);
    }
    is_extreme = false;
    for (int64_t tokens : {96, 97}) {  // a whole chunk, and one more
        run_matrix(run, {nullptr, 48, 320, 32, 4, true, FloatType::kNone, false}, tokens);
        run_matrix(run, {nullptr, 48, 300, 0, 16, false, FloatType::kBfloat16, false}, tokens);
    }
    for (int64_t group : {int64_t{64}, int64_t{0}}) {
        for (int64_t columns : {64, 192, 320, 576}) {
            for (int64_t rows : {1, 16, 33}) {
                for (int64_t tokens : {1, 2, 3, 5, 7}) {
                    run_matrix(run, {nullptr, rows, columns, group, kTernary, true, FloatType::kNone, false}, tokens);
                    run_matrix(run, {nullptr, rows, columns, group, 1, false, FloatType::kNone, false}, tokens);
                }
            }
        }
    }
    for (FloatType type : {FloatType::kBfloat16, FloatType::kFloat16}) {
        for (int64_t columns : {1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 257, 300}) {
            for (int64_t rows : {1, 16, 31, 48}) {
                for (int64_t tokens : {1, 3, 7, 13}) {
                    run_matrix(run, {nullptr, rows, columns, 0, 16, false, type, false}, tokens);
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

void run_vectors(const Run& run) {
    const KernelTable& table = run.table;
    for (int64_t size : {1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 100, 255, 1023}) {
        const std::vector<float> x = random_floats(size), weight = random_floats(size), parts = random_floats(4 * size);
        const std::string of_size = " of " + std::to_string(size);
        std::vector<float> found(static_cast<size_t>(size));
        table.rms_norm(x.data(), weight.data(), 1e-5f, size, found.data());
        run.print(found, "rms_norm" + of_size);
        table.layer_norm(x.data(), weight.data(), parts.data(), 1e-5f, size, found.data());
        run.print(found, "layer_norm" + of_size);
        table.exp(x.data(), size, found.data());
        run.print(found, "exp" + of_size);
        table.silu(x.data(), size, found.data());
        run.print(found, "silu" + of_size);
        const float* const rows[] = {parts.data(), parts.data() + size, parts.data() + 2 * size};
        table.convolve(rows, parts.data() + size, 3, size, found.data());
        run.print(found, "convolve" + of_size);
        table.combine(parts.data(), weight.data(), size < 4 ? 1 : 4, size, found.data());
        run.print(found, "combine" + of_size);
    }
    for (int64_t tiles : {1, 2, 9}) {
        for (bool is_strange : {false, true}) {
            const std::vector<float> x = is_strange ? strange_floats(32 * tiles) : random_floats(32 * tiles);
            std::vector<float> found = Rounded(table, x, 1, 32 * tiles).plain();
            for (float& value : found) {  // any NaN equals any other NaN
                value = std::isnan(value) ? 0.5f : value;
            }
            run.print(found, "round_row of " + std::to_string(32 * tiles));
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

void run_attention(const Run& run) {
    constexpr int32_t kContext = 40;
    constexpr int64_t kTokens = 2, kHeads = 4, kKvHeads = 2, kShared = kHeads / kKvHeads;
    const bool is_scalar = &run.table == &scalar_kernels();
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
                std::vector<float> found(q.size()), scores(kMaxAttentionQueries * kContext);
                const AttentionCall call{q.data(),
                                         k_cache,
                                         v_cache,
                                         is_half,
                                         slots,
                                         positions,
                                         found.data(),
                                         kHeads,
                                         kKvHeads,
                                         size,
                                         kContext,
                                         window,
                                         0.3f,
                                         position % 2 ? nullptr : sinks.data(),
                                         window == 0 && position > 6 ? ends : nullptr,
                                         position > 6 ? bias.data() : nullptr};
                for (int64_t head = 0; head < kHeads; head += kShared) {
                    // A tested set takes all queries that share keys and values at once; scalar takes each alone.
                    if (!is_scalar) {
                        run.table.attention(call, {0, kTokens, head, kShared}, scores.data(), kContext);
                        continue;
                    }
                    for (int64_t i = 0; i < kTokens * kShared; ++i) {
                        run.table.attention(call, {i % kTokens, 1, head + i / kTokens, 1}, scores.data(), kContext);
                    }
                }
                run.print(found, "attention of heads of " + std::to_string(size));
            }
        }
        for (int64_t half : {size / 2, int64_t{1}}) {
            std::vector<float> found = random_floats(kHeads * size);
            const std::vector<float> cos = random_floats(3 * half), sin = random_floats(3 * half);
            const int32_t position = 2;
            run.table.rope({found.data(), cos.data(), sin.data(), &position, kHeads, size, half, false}, 0);
            run.print(found, "rope of heads of " + std::to_string(size));
        }
    }
}

void run_delta_rule(const Run& run) {
    constexpr int64_t kTokens = 5, kKeyHeads = 2, kHeads = 4, kValues = 2 * kStateColumns;
    for (int64_t size : {1, 7, 8, 20, 128}) {
        const std::vector<float> q = random_floats(kTokens * kKeyHeads * size), k = random_floats(kTokens * kKeyHeads * size);
        const std::vector<float> v = random_floats(kTokens * kHeads * kValues), rate = random_floats(kTokens * kHeads);
        const std::vector<float> decay(rate.size(), 0.9f);
        std::vector<float> found(v.size(), -1.0f), state = random_floats(size * kStateColumns);
        const DeltaCall call{q.data(), k.data(), v.data(), decay.data(), rate.data(), found.data(), kKeyHeads, kHeads, size, kValues};
        run.table.delta_rule(call, 3, 1, 0, 2, state.data());
        run.table.delta_rule(call, 3, 1, 2, kTokens, state.data());
        found.insert(found.end(), state.begin(), state.end());
        run.print(found, "delta_rule of heads of " + std::to_string(size));
    }
}

void run_routes(const Run& run) {
    for (int64_t experts : {1, 7, 8, 64, 130}) {
        std::vector<float> logits = random_floats(experts), shares(static_cast<size_t>(experts));
        logits[0] = logits[static_cast<size_t>(experts / 2)];  // a tie
        const int64_t top_k = experts < 8 ? 1 : 8;
        for (bool renormalizes : {false, true}) {
            std::vector<int32_t> chosen(static_cast<size_t>(top_k), -1);
            std::vector<float> weights(static_cast<size_t>(top_k), -1.0f);
            run.table.route({logits.data(), chosen.data(), weights.data(), experts, top_k, renormalizes}, 0, shares.data());
            weights.insert(weights.end(), chosen.begin(), chosen.end());
            run.print(weights, (renormalizes ? "renormalized route over " : "route over ") + std::to_string(experts));
        }
    }
}

void run_quantizer(const Run& run) {
    for (int64_t rows : {1, 13, 64, 77}) {
        constexpr int64_t kColumns = 96, kGroups = 3, kSize = 6;
        const std::string what = " of " + std::to_string(rows) + " rows";
        const std::vector<float> weights = random_floats(kColumns * rows), factors = {0.9f, 0.7f, 0.4f};
        std::vector<float> shares = random_floats(kGroups * kColumns), factor = random_floats(kColumns * kColumns), scratch(2 * 32 * 8);
        for (float& share : shares) {
            share = std::fabs(share);
        }
        std::vector<float> scales(static_cast<size_t>(kGroups * rows)), minima(scales), out(weights);
        std::vector<uint8_t> codes(weights.size()), largest(static_cast<size_t>(rows), 3);
        std::vector<int64_t> order(kColumns);
        std::vector<double> squares(static_cast<size_t>(rows));
        for (int64_t k = 0; k < kColumns; ++k) {
            order[static_cast<size_t>(k)] = kColumns - 1 - k;
        }
        const GridCall grids{weights.data(), scales.data(), minima.data(), kColumns, kGroups, rows};
        for (int kind = 0; kind < 3; ++kind) {  // with minima, symmetric, three values
            run.table.search_ranges({weights.data(), shares.data(), factors.data(), kind == 2 ? scratch.data() : nullptr,
                                     scales.data(), minima.data(), kColumns, kGroups, rows, kind == 2 ? 1 : 3,
                                     kind == 2 ? 2.0f : 7.0f, kind == 2 ? 1.0f : 4.0f, kind > 0});
            run.table.nearest_codes(grids, kind == 2 ? 2.0f : 7.0f, codes.data());
            run.table.differences(grids, codes.data(), order.data(), out.data(), squares.data());
            std::vector<float> found(out);
            found.insert(found.end(), scales.begin(), scales.end());
            found.insert(found.end(), codes.begin(), codes.end());
            found.insert(found.end(), squares.begin(), squares.end());
            run.print(found, "nearest" + what);
        }
        std::vector<float> work(weights), inverses(scales), sums(scales);
        for (float& inverse : inverses) {
            inverse = 1.0f / inverse;
        }
        for (float& entry : factor) {
            entry = entry * 0.02f + 1.0f;
        }
        run.table.round_columns({work.data(), factor.data(), order.data(), scales.data(), inverses.data(), minima.data(),
                                 largest.data(), codes.data(), squares.data(), kColumns, kGroups, rows, 10, 70});
        work.insert(work.end(), codes.begin(), codes.end());
        work.insert(work.end(), squares.begin(), squares.end());
        run.print(work, "columns" + what);
        run.table.code_sums({weights.data(), codes.data(), sums.data(), kGroups, kColumns / kGroups, rows, 2.0f});
        run.print(sums, "sums" + what);
        std::vector<float> systems = random_floats(kSize * kSize * rows), x = random_floats(kSize * rows), y(x);
        const std::vector<float> diagonal(x.size(), 100.0f);
        scratch.resize(2 * kSize * kSize * 8);
        std::vector<float> tile(kColumns * kSystemTile);
        run.table.code_systems({codes.data(), factor.data(), shares.data(), systems.data(), tile.data(), kColumns, kGroups, rows,
                                rows, kSize, 1.0f});
        run.table.multiply_systems({systems.data(), kSize, rows}, x.data(), y.data());
        run.table.solve_systems({systems.data(), kSize, rows}, diagonal.data(), x.data(), scratch.data());
        x.insert(x.end(), y.begin(), y.end());
        run.print(x, "systems" + what);
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
        state = kFirstState;
        const Run run{*named};
        run_products(run);
        run_vectors(run);
        run_attention(run);
        run_delta_rule(run);
        run_routes(run);
        run_quantizer(run);
    }
    return 0;
}
