// The module `_native`. Each function checks every argument, then releases the interpreter lock around the work.
// Start here to find the C++ side of a function of runtime/kernels. The other *_bindings.cpp are called at the end.
// Shapes and meanings: runtime/kernels/reference/. Types: runtime/kernels/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "python/bound_weights.h"
#include "operations/operations.h"
#include "threads/thread_pool.h"

namespace moec {
namespace {

void bind_linears(const std::vector<const PackedMatrix*>& matrices, nb::handle x_object, nb::list out_objects) {
    const Array x(x_object, "x", Kind::kFloat32, 2);
    const int64_t count = static_cast<int64_t>(matrices.size()), tokens = x.size(0);
    if (matrices.empty() || matrices.size() > static_cast<size_t>(kMaxMatrices) || out_objects.size() != matrices.size()) {
        refuse("matrices: expected 1 to " + std::to_string(kMaxMatrices) + " and as many outputs, found " +
               std::to_string(matrices.size()) + " and " + std::to_string(out_objects.size()));
    }
    std::vector<std::unique_ptr<Array>> outs;
    std::vector<const MatrixView*> views;
    std::vector<float*> places;
    for (size_t i = 0; i < matrices.size(); ++i) {
        if (matrices[i] == nullptr) {
            refuse("matrices: expected packed matrices, found None");
        }
        views.push_back(&matrices[i]->view);
        x.expect({tokens, views[i]->columns});
        outs.push_back(std::make_unique<Array>(out_objects[i], "outs", Kind::kFloat32, 2, Access::kWrite));
        outs[i]->expect({tokens, views[i]->rows});
        outs[i]->expect_apart(x);
        for (size_t other = 0; other < i; ++other) {
            outs[i]->expect_apart(*outs[other]);
        }
        places.push_back(outs[i]->data<float>());
    }
    bool has_memory;
    {
        nb::gil_scoped_release unlocked;
        has_memory = linears(views.data(), count, x.data<const float>(), tokens, places.data());
    }
    expect_memory(has_memory);
}

void bind_linear_of_bfloats(const PackedMatrix& matrix, nb::handle x_object, nb::handle out_object) {
    const Array x(x_object, "x", Kind::kFloat32, 2), out(out_object, "out", Kind::kFloat32, 2, Access::kWrite);
    x.expect({x.size(0), matrix.view.columns});
    out.expect({x.size(0), matrix.view.rows});
    out.expect_apart(x);
    const BfloatKernels* kernels = active_bfloat_kernels();
    if (matrix.view.float_type != FloatType::kBfloat16 || kernels == nullptr) {
        refuse("matrix: expected bfloat16, and kernels that multiply it with bfloat16 activations");
    }
    bool has_memory;
    {
        nb::gil_scoped_release unlocked;
        has_memory = linear_of_bfloats(*kernels, matrix.view, x.data<const float>(), x.size(0), out.data<float>());
    }
    expect_memory(has_memory);
}

void bind_dequantize_rows(const PackedMatrix& matrix, nb::handle rows_object, nb::handle out_object) {
    const Array rows(rows_object, "rows", Kind::kInt64, 1), out(out_object, "out", Kind::kFloat32, 2, Access::kWrite);
    out.expect({rows.size(0), matrix.view.columns});
    rows.expect_indices(matrix.view.rows);
    nb::gil_scoped_release unlocked;
    dequantize_rows(matrix.view, rows.data<const int64_t>(), rows.size(0), out.data<float>());
}

void bind_expert_ffn(const Expert& expert, nb::handle x_object, nb::handle tokens_object, nb::handle ranks_object,
                     nb::handle out_object) {
    const Array x(x_object, "x", Kind::kFloat32, 2), tokens(tokens_object, "tokens", Kind::kInt32, 1);
    const Array ranks(ranks_object, "ranks", Kind::kInt32, 1), out(out_object, "out", Kind::kFloat32, 3, Access::kWrite);
    x.expect({x.size(0), expert.view.gate.columns});
    ranks.expect({tokens.size(0)});
    out.expect({x.size(0), out.size(1), expert.view.down.rows});
    tokens.expect_indices(x.size(0));
    ranks.expect_indices(out.size(1));
    out.expect_apart(x);
    std::vector<int64_t> rows(2 * static_cast<size_t>(tokens.size(0)));
    int64_t* x_rows = rows.data();
    int64_t* out_rows = x_rows + tokens.size(0);
    for (int64_t i = 0; i < tokens.size(0); ++i) {
        x_rows[i] = tokens.data<const int32_t>()[i];
        out_rows[i] = x_rows[i] * out.size(1) + ranks.data<const int32_t>()[i];
    }
    bool has_memory;
    {
        nb::gil_scoped_release unlocked;
        has_memory = expert_ffn(expert.view, {x.data<const float>(), x_rows, out_rows, tokens.size(0), out.data<float>()});
    }
    expect_memory(has_memory);
}

void bind_experts_of_token(const std::vector<const Expert*>& experts, nb::handle x_object, nb::handle ranks_object,
                           nb::handle out_object) {
    const Array x(x_object, "x", Kind::kFloat32, 2), ranks(ranks_object, "ranks", Kind::kInt32, 1);
    const Array out(out_object, "out", Kind::kFloat32, 3, Access::kWrite);
    const int64_t count = static_cast<int64_t>(experts.size());
    std::vector<const ExpertView*> views;
    for (const Expert* expert : experts) {
        if (expert == nullptr) {
            refuse("experts: expected experts, found None");
        }
        views.push_back(&expert->view);
        const MatrixView& gate = expert->view.gate;
        const bool is_same = gate.rows == views[0]->gate.rows && gate.columns == views[0]->gate.columns;
        if (!is_same) {
            refuse("experts: expected one size for all");
        }
    }
    ranks.expect({count});
    if (count == 0) {
        return;
    }
    x.expect({1, views[0]->gate.columns});
    out.expect({1, out.size(1), views[0]->down.rows});
    ranks.expect_indices(out.size(1));
    out.expect_apart(x);
    std::vector<int64_t> rows(ranks.data<const int32_t>(), ranks.data<const int32_t>() + count);
    bool has_memory;
    {
        nb::gil_scoped_release unlocked;
        has_memory = experts_of_token(views.data(), count, x.data<const float>(), rows.data(), out.data<float>());
    }
    expect_memory(has_memory);
}

void bind_combine(nb::handle parts_object, nb::handle weights_object, nb::handle out_object) {
    const Array parts(parts_object, "parts", Kind::kFloat32, 3), weights(weights_object, "weights", Kind::kFloat32, 2);
    const Array out(out_object, "out", Kind::kFloat32, 2, Access::kWrite);
    weights.expect({parts.size(0), parts.size(1)});
    out.expect({parts.size(0), parts.size(2)});
    out.expect_apart(parts);
    nb::gil_scoped_release unlocked;
    combine(parts.data<const float>(), weights.data<const float>(), parts.size(0), parts.size(1), parts.size(2),
            out.data<float>());
}

void bind_rms_norm(nb::handle x_object, nb::handle weight_object, float eps, nb::handle out_object) {
    const Array x(x_object, "x", Kind::kFloat32, 2), weight(weight_object, "weight", Kind::kFloat32, 1);
    const Array out(out_object, "out", Kind::kFloat32, 2, Access::kWrite);
    weight.expect({x.size(1)});
    out.expect({x.size(0), x.size(1)});
    nb::gil_scoped_release unlocked;
    rms_norm(x.data<const float>(), weight.data<const float>(), eps, x.size(0), x.size(1), out.data<float>());
}

void bind_layer_norm(nb::handle x_object, nb::handle weight_object, nb::handle bias_object, float eps, nb::handle out_object) {
    const Array x(x_object, "x", Kind::kFloat32, 2), weight(weight_object, "weight", Kind::kFloat32, 1);
    const Array bias(bias_object, "bias", Kind::kFloat32, 1), out(out_object, "out", Kind::kFloat32, 2, Access::kWrite);
    weight.expect({x.size(1)});
    bias.expect({x.size(1)});
    out.expect({x.size(0), x.size(1)});
    nb::gil_scoped_release unlocked;
    layer_norm(x.data<const float>(), weight.data<const float>(), bias.data<const float>(), eps, x.size(0), x.size(1),
               out.data<float>());
}

void bind_route(nb::handle logits_object, bool renormalize, nb::handle experts_object, nb::handle weights_object) {
    const Array logits(logits_object, "logits", Kind::kFloat32, 2);
    const Array experts(experts_object, "experts", Kind::kInt32, 2, Access::kWrite);
    const Array weights(weights_object, "weights", Kind::kFloat32, 2, Access::kWrite);
    experts.expect({logits.size(0), experts.size(1)});
    weights.expect({logits.size(0), experts.size(1)});
    if (experts.size(1) < 1 || experts.size(1) > logits.size(1)) {
        refuse("top_k: expected 1 to " + std::to_string(logits.size(1)) + ", found " + std::to_string(experts.size(1)));
    }
    const RouteCall call{logits.data<const float>(), experts.data<int32_t>(), weights.data<float>(),
                         logits.size(1),             experts.size(1),         renormalize};
    bool has_memory;
    {
        nb::gil_scoped_release unlocked;
        has_memory = route(call, logits.size(0));
    }
    expect_memory(has_memory);
}

void bind_exp(nb::handle x_object, nb::handle out_object) {
    const Array x(x_object, "x", Kind::kFloat32, 1), out(out_object, "out", Kind::kFloat32, 1, Access::kWrite);
    out.expect({x.size(0)});
    nb::gil_scoped_release unlocked;
    active_kernels().exp(x.data<const float>(), x.size(0), out.data<float>());
}

nb::tuple available_names() {
    const KernelTable* tables[kMaxTables];
    const int count = supported_kernels(tables);
    nb::list names;
    for (int i = 0; i < count; ++i) {
        names.append(tables[i]->name);
    }
    return nb::tuple(names);
}

void bind_select(const std::string& name) {
    if (!select_kernels(name.c_str())) {
        refuse("no kernels of this name");
    }
}

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

void bind_set_threads(int count) {
    constexpr int kMaxThreads = 256;
    if (count < 1 || count > kMaxThreads) {
        refuse("threads: expected 1 to " + std::to_string(kMaxThreads) + ", found " + std::to_string(count));
    }
    nb::gil_scoped_release unlocked;
    set_thread_count(count);
}

}  // namespace
}  // namespace moec

NB_MODULE(_native, module) {
    using namespace nanobind::literals;
    using namespace moec;
    nb::set_leak_warnings(false);  // matrices may live longer than the interpreter's last collection
    nb::class_<PackedMatrix>(module, "PackedMatrix")
        .def(nb::init<nb::handle, int64_t, int64_t, int, int64_t, bool, int, bool>(), "data"_a, "rows"_a, "columns"_a,
             "bitwidth"_a, "group_size"_a, "symmetric"_a, "float_type"_a, "byte_scales"_a)
        .def_prop_ro("rows", [](const PackedMatrix& matrix) { return matrix.view.rows; })
        .def_prop_ro("columns", [](const PackedMatrix& matrix) { return matrix.view.columns; })
        .def("move_to", &PackedMatrix::move_to, "data"_a);
    nb::class_<Expert>(module, "Expert")
        .def(nb::init<nb::object, nb::object, nb::object, int, float, nb::list, bool>(), "gate"_a.none(), "up"_a, "down"_a,
             "activation"_a = 0, "limit"_a = 0.0f, "biases"_a = nb::list(), "reads_bfloats"_a = false)
        .def("follow_matrices", &Expert::follow_matrices);
    module.def("available", available_names);
    module.def("active", [] { return active_kernels().name; });
    module.def("select", bind_select, "name"_a);
    module.def("bfloat_kernels", [] {
        const BfloatKernels* found = active_bfloat_kernels();
        return found == nullptr ? "" : found->name;
    });
    module.def("set_threads", bind_set_threads, "count"_a);
    module.def("linears", bind_linears, "matrices"_a, "x"_a, "outs"_a);
    module.def("linear_of_bfloats", bind_linear_of_bfloats, "matrix"_a, "x"_a, "out"_a);
    module.def("dequantize_rows", bind_dequantize_rows, "matrix"_a, "rows"_a, "out"_a);
    module.def("experts_of_token", bind_experts_of_token, "experts"_a, "x"_a, "ranks"_a, "out"_a);
    module.def("expert_ffn", bind_expert_ffn, "expert"_a, "x"_a, "tokens"_a, "ranks"_a, "out"_a);
    module.def("combine", bind_combine, "parts"_a, "weights"_a, "out"_a);
    module.def("rms_norm", bind_rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a);
    module.def("layer_norm", bind_layer_norm, "x"_a, "weight"_a, "bias"_a, "eps"_a, "out"_a);
    module.def("route", bind_route, "logits"_a, "renormalize"_a, "experts"_a, "weights"_a);
    module.def("exp", bind_exp, "x"_a, "out"_a);
    module.def("router_shares", bind_router_shares, "matrices"_a, "norms"_a, "eps"_a, "x"_a, "out"_a, "biases"_a = nb::list());
    module.def("largest", bind_largest, "values"_a, "count"_a);
    bind_attention(module);
    bind_recurrent_layers(module);
    bind_cache(module);
    bind_expert_layers(module);
    bind_quantizer(module);
}
