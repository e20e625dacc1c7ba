// What the bindings of layers share: weights that are kept alive, with checked shapes.

#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention_layer.h"
#include "python/bound_weights.h"

namespace moec {

// An array, or None.
class MaybeArray {
  public:
    MaybeArray() = default;
    MaybeArray(nb::handle object, const char* name, Kind kind, int rank)
        : array_(object.is_none() ? nullptr : std::make_unique<Array>(object, name, kind, rank)) {}

    explicit operator bool() const { return array_ != nullptr; }
    const Array* operator->() const { return array_.get(); }
    template <class Value>
    const Value* data() const {
        return array_ == nullptr ? nullptr : array_->data<const Value>();
    }
    void expect(std::initializer_list<int64_t> shape) const {
        if (array_ != nullptr) {
            array_->expect(shape);
        }
    }

  private:
    std::unique_ptr<Array> array_;
};

inline void expect_rotated(int64_t rotated, int64_t head_size) {
    if (rotated > head_size / 2) {
        refuse("cos: expected at most " + std::to_string(head_size / 2) + " columns, found " + std::to_string(rotated));
    }
}

inline const PackedMatrix& packed(nb::handle matrix) {
    if (!nb::isinstance<PackedMatrix>(matrix)) {
        refuse("matrices: expected packed matrices");
    }
    return nb::cast<const PackedMatrix&>(matrix);
}

// Matrices of a layer, kept alive. Their memory may move between calls: `rebind` updates the views.
class Matrices {
  public:
    const MatrixView& take(nb::handle object, MatrixView& view) {
        const PackedMatrix& matrix = packed(object);
        held_.append(object);
        views_.emplace_back(&matrix, &view);
        return view = matrix.view;
    }

    void rebind() const {
        for (const auto& [matrix, view] : views_) {
            view->data = matrix->view.data;
        }
    }

  private:
    nb::list held_;
    std::vector<std::pair<const PackedMatrix*, MatrixView*>> views_;
};

// Vectors and tables of a layer's weights, kept alive.
class Vectors {
  public:
    Vectors() = default;
    Vectors(const Vectors&) = delete;
    Vectors& operator=(const Vectors&) = delete;

    // Returns the values of an array, or null for None.
    const float* take(nb::handle object, const char* name, std::initializer_list<int64_t> shape) {
        arrays_.emplace_back(object, name, Kind::kFloat32, static_cast<int>(shape.size()));
        arrays_.back().expect(shape);
        return arrays_.back().data<float>();
    }

    const float* take_present(nb::handle object, const char* name, std::initializer_list<int64_t> shape) {
        if (object.is_none()) {
            refuse(std::string(name) + ": expected an array, found None");
        }
        return take(object, name, shape);
    }

    // norm: the weight, the bias or None, and the weight of the norm afterwards or None.
    StreamEnds ends(const nb::tuple& norm, float eps, float residual_scale, int64_t size) {
        if (norm.size() != 3) {
            refuse("norm: expected a weight, a bias and the weight of a norm afterwards");
        }
        return {take_present(norm[0], "norm", {size}), take(norm[1], "norm_bias", {size}), take(norm[2], "after_norm", {size}),
                eps, residual_scale};
    }

    // tables: cosines and sines, or None.
    Rotation rotation(nb::handle tables, bool is_interleaved, int64_t head_size) {
        if (tables.is_none()) {
            return {nullptr, nullptr, 0, false};
        }
        const nb::tuple both = nb::cast<nb::tuple>(tables);
        if (both.size() != 2) {
            refuse("rotation: expected cosines and sines");
        }
        const Array cos(both[0], "cos", Kind::kFloat32, 2);
        positions = cos.size(0);
        const int64_t half = cos.size(1);
        expect_rotated(half, head_size);
        return {take(both[0], "cos", {positions, half}), take(both[1], "sin", {positions, half}), half, is_interleaved};
    }

    int64_t positions = 0;  // of the rotation tables

  private:
    std::vector<MaybeArray> arrays_;
};

}  // namespace moec
