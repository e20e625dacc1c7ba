// Products of experts, split over threads by row blocks.
// A split never changes a result: one thread computes each output value, in an order that depends only on its own inputs.
// The scratch is at most 96 x (1.25 K + 5.25 F) bytes, and 2 bytes more per K and F with rows of bfloat16.

#include <algorithm>
#include <vector>

#include "operations/activation_forms.h"
#include "operations/operations.h"
#include "operations/split_work.h"

namespace moec {
namespace {

// At the end of an operation, a thread waits for half a part on average.
constexpr int64_t kPartsPerExpert = 4;

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

// Adds the bias of the down projection to row blocks [begin, end) of its outputs.
void add_bias(const ExpertView& expert, int64_t tokens, const OutputRows& out, int64_t begin, int64_t end) {
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

// Some tokens of one expert, and its scratch.
struct Piece {
    const ExpertView* expert;
    const ExpertCall* call;
    int64_t first, tokens;  // rows [first, first + tokens) of the call
    Forms input, inner;
    float *input_memory, *inner_memory, *hidden;
    Activations inputs;

    int64_t size() const { return expert->gate.columns; }
    int64_t width() const { return expert->gate.rows; }
    int64_t input_floats() const { return form_floats(Used::kTogether, input, tokens, size()); }
    int64_t inner_floats() const { return form_floats(Used::kTogether, inner, tokens, width()); }
    int64_t hidden_floats() const { return tokens * width(); }
};

// Pieces that are computed together: at most kTokensAtOnce rows, those counted that only fill a group of rows.
class Pieces {
  public:
    Pieces(const ExpertView* const* experts, const ExpertCall* calls, int64_t count)
        : experts_(experts), calls_(calls), count_(count) {}

    // Takes the next pieces. Returns false after the last one.
    bool next() {
        size = 0;
        for (int64_t room = kTokensAtOnce; expert_ < count_ && size < kTokensAtOnce;) {
            const ExpertCall& call = calls_[expert_];
            const int64_t tokens = std::min(call.count - first_, kTokensAtOnce);
            const int64_t together = rows_side_by_side(Used::kTogether, tokens);
            room -= (tokens + together - 1) / together * together;
            if (room < 0 && size > 0) {
                break;
            }
            if (tokens > 0) {
                add(*experts_[expert_], call, tokens);
            }
            first_ += tokens;
            if (first_ >= call.count) {
                first_ = 0;
                ++expert_;
            }
        }
        return size > 0;
    }

    bool take_memory() {
        int64_t floats = 0;
        for (int64_t i = 0; i < size; ++i) {
            floats += all[i].input_floats() + all[i].inner_floats() + all[i].hidden_floats();
        }
        float* memory = operation_scratch.take(floats);
        for (int64_t i = 0; memory != nullptr && i < size; ++i) {
            all[i].input_memory = memory;
            all[i].inner_memory = all[i].input_memory + all[i].input_floats();
            all[i].hidden = all[i].inner_memory + all[i].inner_floats();
            memory = all[i].hidden + all[i].hidden_floats();
        }
        return memory != nullptr;
    }

    // make(piece) for each, over threads. A piece alone is split over threads by `make`.
    template <class Make>
    void make_forms_of_all(int64_t columns, const Make& make) {
        int64_t tokens = 0;
        for (int64_t i = 0; i < size; ++i) {
            tokens += all[i].tokens;
        }
        const double flops = kFlopsPerRounded * static_cast<double>(tokens) * static_cast<double>(columns);
        parallel_for(size, size == 1 ? 1 : threads_for(flops), [&](int64_t i, int) { make(all[i]); });
    }

    // body(piece, begin, end) over parts of the row blocks of all pieces, numbered through.
    template <class Body>
    void split(int64_t blocks, double flops_of_token, const Body& body) {
        double flops = 0;
        for (int64_t i = 0; i < size; ++i) {
            flops += flops_of_token * static_cast<double>(all[i].tokens);
        }
        split_blocks(size * blocks, flops, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin / blocks; i * blocks < end; ++i) {
                body(all[i], std::max(begin - i * blocks, int64_t{0}), std::min(end - i * blocks, blocks));
            }
        });
    }

    int64_t size = 0;
    Piece all[kTokensAtOnce];

  private:
    void add(const ExpertView& expert, const ExpertCall& call, int64_t tokens) {
        const Forms input = both(forms_of(expert, expert.gate), forms_of(expert, expert.up));
        all[size++] = {&expert, &call, first_, tokens, input, forms_of(expert, expert.down), nullptr, nullptr, nullptr, {}};
    }

    const ExpertView* const* experts_;
    const ExpertCall* calls_;
    int64_t count_, expert_ = 0, first_ = 0;
};

}  // namespace

bool experts_ffn(const ExpertView* const* experts, const ExpertCall* calls, int64_t count) {
    const KernelTable& kernels = active_kernels();
    for (Pieces pieces(experts, calls, count); pieces.next();) {
        if (!pieces.take_memory()) {
            return false;
        }
        const ExpertView& first = *pieces.all[0].expert;
        const int64_t size = first.gate.columns, width = first.gate.rows;
        pieces.make_forms_of_all(size, [&](Piece& piece) {
            const InputRows rows{piece.call->x, size, piece.call->x_rows + piece.first};
            piece.inputs = make_forms(Used::kTogether, piece.input, rows, piece.tokens, size, piece.input_memory);
        });
        pieces.split(blocks_of(first.gate), 2 * product_flops(first.gate, 1), [&](Piece& piece, int64_t begin, int64_t end) {
            const ExpertView& expert = *piece.expert;
            kernels.expert_hidden(expert.gate, expert.up, expert.gating, piece.inputs, piece.tokens,
                                  {piece.hidden, width, nullptr}, begin, end);
        });
        pieces.make_forms_of_all(width, [&](Piece& piece) {
            const InputRows rows{piece.hidden, width, nullptr};
            piece.inputs = make_forms(Used::kTogether, piece.inner, rows, piece.tokens, width, piece.inner_memory);
        });
        pieces.split(blocks_of(first.down), product_flops(first.down, 1), [&](Piece& piece, int64_t begin, int64_t end) {
            const OutputRows outputs{piece.call->out, first.down.rows, piece.call->out_rows + piece.first};
            kernels.linear(piece.expert->down, piece.inputs, piece.tokens, outputs, begin, end);
            add_bias(*piece.expert, piece.tokens, outputs, begin, end);
        });
    }
    return true;
}

bool expert_ffn(const ExpertView& expert, const ExpertCall& call) {
    const ExpertView* const experts[] = {&expert};
    return experts_ffn(experts, &call, 1);
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
