// Weights as Python objects. They keep the memory alive that their views point to.

#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>

#include "python/arguments.h"
#include "operations/operations.h"

namespace moec {

// A matrix that keeps its memory alive.
struct PackedMatrix {
    std::unique_ptr<Array> data;
    MatrixView view;

    PackedMatrix(nb::handle bytes, int64_t rows, int64_t columns, int bitwidth, int64_t group_size, bool is_symmetric,
                 int float_type, bool has_byte_scales)
        : data(std::make_unique<Array>(bytes, "data", Kind::kUint8, 1)),
          view{data->data<const uint8_t>(),        rows,           columns, group_size, bitwidth, is_symmetric,
               static_cast<FloatType>(float_type), has_byte_scales} {
        if (float_type < 0 || float_type > static_cast<int>(FloatType::kMxfp4) || !is_valid(view)) {
            refuse("not a matrix of the format: " + std::to_string(rows) + " x " + std::to_string(columns) + ", bitwidth " +
                   std::to_string(bitwidth) + ", group_size " + std::to_string(group_size));
        }
        if (data->bytes() != packed_bytes(view)) {
            refuse("data: expected " + std::to_string(packed_bytes(view)) + " bytes, found " + std::to_string(data->bytes()));
        }
    }

    // Moves the matrix to other memory of the same size. Raises ValueError if the size differs.
    void move_to(nb::handle bytes) {
        auto other = std::make_unique<Array>(bytes, "data", Kind::kUint8, 1);
        if (other->bytes() != data->bytes()) {
            refuse("data: expected " + std::to_string(data->bytes()) + " bytes, found " + std::to_string(other->bytes()));
        }
        data = std::move(other);
        view.data = data->data<const uint8_t>();
    }
};

// Two or three matrices and up to three biases, kept alive. The gate is None with kRelu.
struct Expert {
    nb::object gate, up, down;
    std::unique_ptr<Array> biases[3];
    ExpertView view;

    // reads_bfloats: bfloat16 matrices read activations rounded to bfloat16, by the kernels that are active now.
    Expert(nb::object gate_matrix, nb::object up_matrix, nb::object down_matrix, int activation, float limit,
           nb::list bias_objects, bool reads_bfloats)
        : gate(gate_matrix), up(up_matrix), down(down_matrix) {
        const bool has_gate = activation != static_cast<int>(Activation::kRelu);
        if (has_gate == gate.is_none() || (!has_gate && bias_objects.size() != 0)) {
            refuse("gate: expected a matrix, or None and no biases with the activation relu");
        }
        view = {nb::cast<const PackedMatrix&>(has_gate ? gate : up).view,
                nb::cast<const PackedMatrix&>(up).view,
                nb::cast<const PackedMatrix&>(down).view,
                {static_cast<Activation>(activation), limit, nullptr, nullptr},
                nullptr,
                reads_bfloats ? active_bfloat_kernels() : nullptr};
        if (reads_bfloats && view.bfloats == nullptr) {
            refuse(std::string("bfloat16 activations: the kernels `") + active_kernels().name + "` have no such products");
        }
        const bool is_known = activation >= 0 && activation <= static_cast<int>(Activation::kGelu);
        if (!is_known || (bias_objects.size() != 0 && bias_objects.size() != 3)) {
            refuse("activation or biases: expected a known activation, and no biases or three");
        }
        for (size_t i = 0; i < bias_objects.size(); ++i) {
            const MatrixView& matrix = i == 0 ? view.gate : i == 1 ? view.up : view.down;
            biases[i] = std::make_unique<Array>(bias_objects[i], "bias", Kind::kFloat32, 1);
            biases[i]->expect({matrix.rows});
        }
        if (bias_objects.size() != 0) {
            view.gating.gate_bias = biases[0]->data<const float>();
            view.gating.up_bias = biases[1]->data<const float>();
            view.down_bias = biases[2]->data<const float>();
        }
        const bool is_same = view.gate.rows == view.up.rows && view.gate.columns == view.up.columns;
        if (!is_same || view.down.rows != view.gate.columns || view.down.columns != view.gate.rows) {
            refuse("gate, up and down: expected F x D, F x D and D x F");
        }
    }

    // Call it after the matrices have moved.
    void follow_matrices() {
        view.gate.data = nb::cast<const PackedMatrix&>(gate.is_none() ? up : gate).view.data;
        view.up.data = nb::cast<const PackedMatrix&>(up).view.data;
        view.down.data = nb::cast<const PackedMatrix&>(down).view.data;
    }
};

}  // namespace moec
