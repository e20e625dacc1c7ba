// Bindings of layers with a recurrent state. Shapes and meanings: runtime/kernels/recurrent_layers.py.

#include <algorithm>
#include <string>
#include <vector>

#include "attention/recurrent_layer.h"
#include "python/bindings.h"
#include "python/bound_layers.h"

namespace moec {
namespace {

// One state array of every slot and the array of kept ones.
struct States {
    Array live, kept;

    States(nb::handle live_object, nb::handle kept_object, int rank)
        : live(live_object, "live", Kind::kFloat32, rank, Access::kWrite),
          kept(kept_object, "kept", Kind::kFloat32, rank, Access::kWrite) {
        kept.expect_apart(live);
    }

    void expect(std::initializer_list<int64_t> shape) const {
        live.expect(shape);
        kept.expect(shape);
    }
    SlotStates view() const { return {live.data<float>(), kept.data<float>()}; }
};

// Where the tokens of a pass are. The tokens of a slot are adjacent and their positions follow each other.
struct Sequence {
    Array slots, positions, kept_at;

    Sequence(nb::handle slots_object, nb::handle positions_object, nb::handle kept_at_object, int64_t tokens, int64_t slot_count)
        : slots(slots_object, "slots", Kind::kInt32, 1),
          positions(positions_object, "positions", Kind::kInt32, 1),
          kept_at(kept_at_object, "kept_at", Kind::kInt32, 1) {
        slots.expect({tokens});
        positions.expect({tokens});
        kept_at.expect({slot_count});
        slots.expect_indices(slot_count);
        const auto *slot = slots.data<const int32_t>(), *position = positions.data<const int32_t>();
        std::vector<bool> has_begun(static_cast<size_t>(slot_count));
        for (int64_t t = 0; t < tokens; ++t) {
            const bool continues = t > 0 && slot[t] == slot[t - 1];
            if (continues ? position[t] != position[t - 1] + 1 : has_begun[static_cast<size_t>(slot[t])] || position[t] < 0) {
                refuse("positions: expected adjacent tokens of each slot, one position after the other");
            }
            has_begun[static_cast<size_t>(slot[t])] = true;
        }
    }

    RecurrentTokens view() const {
        return {slots.data<const int32_t>(), positions.data<const int32_t>(), kept_at.data<const int32_t>(), slots.size(0)};
    }
};

void expect_taps(int64_t count) {
    if (count < 2 || count > kMostTaps) {
        refuse("taps: expected 2 to " + std::to_string(kMostTaps) + ", found " + std::to_string(count));
    }
}

class ConvolutionLayer {
  public:
    ConvolutionLayer(nb::tuple norm, float norm_eps, nb::object input, nb::object taps, nb::object output,
                     float residual_scale) {
        matrices_.take(input, view_.input);
        matrices_.take(output, view_.output);
        const int64_t size = view_.output.rows;
        if (view_.output.columns != size || view_.input.columns != size || view_.input.rows != 3 * size) {
            refuse("input and output: expected 3 D x D and D x D");
        }
        view_.tap_count = static_cast<int64_t>(nb::len(taps));
        expect_taps(view_.tap_count);
        view_.taps = vectors_.take_present(taps, "taps", {view_.tap_count, size});
        view_.ends = vectors_.ends(norm, norm_eps, residual_scale, size);
    }

    void mix(nb::handle hidden_object, nb::handle live, nb::handle kept, nb::handle kept_at, nb::handle slots,
             nb::handle positions) const {
        const Array hidden(hidden_object, "hidden", Kind::kFloat32, 2, Access::kWrite);
        hidden.expect({hidden.size(0), view_.output.rows});
        const States rows(live, kept, 3);
        rows.expect({rows.live.size(0), view_.tap_count - 1, view_.output.rows});
        const Sequence tokens(slots, positions, kept_at, hidden.size(0), rows.live.size(0));
        matrices_.rebind();
        bool has_memory;
        {
            nb::gil_scoped_release unlocked;
            has_memory = moec::mix(view_, hidden.data<float>(), rows.view(), tokens.view());
        }
        expect_memory(has_memory);
    }

  private:
    Matrices matrices_;
    Vectors vectors_;
    ConvolutionLayerView view_{};
};

class DeltaLayer {
  public:
    DeltaLayer(nb::tuple norm, float norm_eps, nb::tuple matrices, nb::object taps, nb::object decay_rate, nb::object step_bias,
               nb::tuple length_scales, nb::object output_norm, float output_norm_eps, int64_t key_heads, int64_t value_heads,
               float residual_scale) {
        MatrixView* const views[] = {&view_.query, &view_.key, &view_.value, &view_.gate,
                                     &view_.rate,  &view_.step, &view_.output};
        if (matrices.size() != std::size(views) || length_scales.size() != 2) {
            refuse("matrices: expected those of query, key, value, gate, rate, step and output, and two scales");
        }
        for (size_t i = 0; i < std::size(views); ++i) {
            matrices_.take(matrices[i], *views[i]);
        }
        take_heads(key_heads, value_heads);
        const int64_t size = view_.output.rows;
        view_.tap_count = static_cast<int64_t>(nb::len(taps));
        expect_taps(view_.tap_count);
        view_.taps = vectors_.take_present(taps, "taps", {view_.tap_count, features()});
        view_.decay_rate = vectors_.take_present(decay_rate, "decay_rate", {value_heads});
        view_.step_bias = vectors_.take_present(step_bias, "step_bias", {value_heads});
        view_.query_scale = vectors_.take_present(length_scales[0], "query_scale", {view_.key_size});
        view_.key_scale = vectors_.take_present(length_scales[1], "key_scale", {view_.key_size});
        view_.norm = vectors_.take_present(output_norm, "output_norm", {view_.value_size});
        view_.norm_eps = output_norm_eps;
        view_.ends = vectors_.ends(norm, norm_eps, residual_scale, size);
    }

    void mix(nb::handle hidden_object, nb::handle live_rows, nb::handle kept_rows, nb::handle live, nb::handle kept,
             nb::handle kept_at, nb::handle slots, nb::handle positions) const {
        const Array hidden(hidden_object, "hidden", Kind::kFloat32, 2, Access::kWrite);
        hidden.expect({hidden.size(0), view_.output.rows});
        const States rows(live_rows, kept_rows, 3), states(live, kept, 4);
        const int64_t slot_count = rows.live.size(0), blocks = view_.value_size / kStateColumns;
        rows.expect({slot_count, view_.tap_count - 1, features()});
        states.expect({slot_count, view_.value_heads, blocks * view_.key_size, kStateColumns});
        const Sequence tokens(slots, positions, kept_at, hidden.size(0), slot_count);
        matrices_.rebind();
        bool has_memory;
        {
            nb::gil_scoped_release unlocked;
            has_memory = moec::mix(view_, hidden.data<float>(), rows.view(), states.view(), tokens.view());
        }
        expect_memory(has_memory);
    }

  private:
    int64_t features() const { return view_.query.rows + view_.key.rows + view_.value.rows; }

    void take_heads(int64_t key_heads, int64_t value_heads) {
        const bool are_heads = key_heads > 0 && value_heads > 0 && value_heads % key_heads == 0 &&
                               view_.query.rows == view_.key.rows && view_.key.rows % key_heads == 0 &&
                               view_.value.rows % (value_heads * kStateColumns) == 0 && view_.key.rows > 0 && view_.value.rows > 0;
        const bool fit = view_.gate.rows == view_.value.rows && view_.rate.rows == value_heads && view_.step.rows == value_heads &&
                         view_.output.columns == view_.value.rows;
        bool share_columns = true;
        for (const MatrixView* matrix : {&view_.query, &view_.key, &view_.value, &view_.gate, &view_.rate, &view_.step}) {
            share_columns = share_columns && matrix->columns == view_.output.rows;
        }
        if (!are_heads || !fit || !share_columns) {
            refuse("query, key, value, gate, rate, step and output: expected Hk Dk, Hk Dk, Hv Dv, Hv Dv, Hv and Hv rows of D, and "
                   "D x Hv Dv, with Dv a multiple of " + std::to_string(kStateColumns));
        }
        view_.key_heads = key_heads;
        view_.value_heads = value_heads;
        view_.key_size = view_.key.rows / key_heads;
        view_.value_size = view_.value.rows / value_heads;
    }

    Matrices matrices_;
    Vectors vectors_;
    DeltaLayerView view_{};
};

}  // namespace

void bind_recurrent_layers(nb::module_& module) {
    using namespace nanobind::literals;
    nb::class_<ConvolutionLayer>(module, "ConvolutionLayer")
        .def(nb::init<nb::tuple, float, nb::object, nb::object, nb::object, float>(), "norm"_a, "norm_eps"_a, "input"_a,
             "taps"_a, "output"_a, "residual_scale"_a)
        .def("mix", &ConvolutionLayer::mix, "hidden"_a, "live"_a, "kept"_a, "kept_at"_a, "slots"_a, "positions"_a);
    nb::class_<DeltaLayer>(module, "DeltaLayer")
        .def(nb::init<nb::tuple, float, nb::tuple, nb::object, nb::object, nb::object, nb::tuple, nb::object, float, int64_t,
                      int64_t, float>(),
             "norm"_a, "norm_eps"_a, "matrices"_a, "taps"_a, "decay_rate"_a, "step_bias"_a, "length_scales"_a, "output_norm"_a,
             "output_norm_eps"_a, "key_heads"_a, "value_heads"_a, "residual_scale"_a)
        .def("mix", &DeltaLayer::mix, "hidden"_a, "live_rows"_a, "kept_rows"_a, "live"_a, "kept"_a, "kept_at"_a, "slots"_a,
             "positions"_a);
}

}  // namespace moec
