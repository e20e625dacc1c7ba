// Bindings of looking ahead. Shapes and meanings: runtime/kernels/lookahead.py.

#include "python/lookahead_bindings.h"

#include <nanobind/stl/pair.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/bound_weights.h"
#include "operations/operations.h"
#include "python/vector_arguments.h"

namespace moec {
namespace {

void bind_router_shares(const std::vector<const PackedMatrix*>& matrices, nb::list norm_objects, float eps, nb::handle x_object,
                        nb::handle out_object, nb::list bias_objects) {
    const Array x(x_object, "x", Kind::kFloat32, 2), out(out_object, "out", Kind::kFloat32, 2, Access::kWrite);
    const int64_t count = static_cast<int64_t>(matrices.size());
    if (count < 1 || count > kMaxMatrices || norm_objects.size() != matrices.size()) {
        refuse("matrices: expected 1 to " + std::to_string(kMaxMatrices) + " and as many norms, found " +
               std::to_string(count) + " and " + std::to_string(norm_objects.size()));
    }
    if (bias_objects.size() != 0 && bias_objects.size() != matrices.size()) {
        refuse("biases: expected none, or one for each of " + std::to_string(count) + " matrices, found " +
               std::to_string(bias_objects.size()));
    }
    NormedRouter routers[kMaxMatrices];
    std::vector<std::unique_ptr<Array>> norms, biases;
    for (size_t i = 0; i < matrices.size(); ++i) {
        if (matrices[i] == nullptr) {
            refuse("matrices: expected packed matrices, found None");
        }
        const MatrixView& matrix = matrices[i]->view;
        norms.push_back(std::make_unique<Array>(norm_objects[i], "norms", Kind::kFloat32, 1));
        norms.back()->expect({matrix.columns});
        x.expect({1, matrix.columns});
        out.expect({count, matrix.rows});
        routers[i] = {&matrix, norms.back()->data<const float>(), nullptr};
        if (bias_objects.size() != 0 && !bias_objects[i].is_none()) {
            biases.push_back(std::make_unique<Array>(bias_objects[i], "biases", Kind::kFloat32, 1));
            biases.back()->expect({matrix.rows});
            routers[i].bias = biases.back()->data<const float>();
        }
    }
    out.expect_apart(x);
    bool has_memory;
    {
        nb::gil_scoped_release unlocked;
        has_memory = router_shares(routers, count, eps, x.data<const float>(), out.data<float>());
    }
    expect_memory(has_memory);
}

std::pair<std::vector<int64_t>, std::vector<double>> bind_largest(nb::handle values_object, int64_t count) {
    const Array values(values_object, "values", Kind::kFloat32, 1);
    const float* const all = values.data<const float>();
    std::pair<std::vector<int64_t>, std::vector<double>> found;
    for (const int64_t index : largest(all, values.size(0), count)) {
        found.first.push_back(index);
        found.second.push_back(all[index]);
    }
    return found;
}

}  // namespace

void bind_lookahead(nb::module_& module) {
    using namespace nanobind::literals;
    module.def("router_shares", bind_router_shares, "matrices"_a, "norms"_a, "eps"_a, "x"_a, "out"_a, "biases"_a = nb::list());
    module.def("largest", bind_largest, "values"_a, "count"_a);
}

}  // namespace moec
