// Bindings of attention: its single steps, and layers from the residual stream back to the residual stream.
// Shapes and meanings: runtime/kernels/reference/, runtime/kernels/attention_layer.py and latent_layer.py.

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attention/attention_layer.h"
#include "python/bindings.h"
#include "python/bound_layers.h"

namespace moec {
namespace {

// Keys and values, [S, Hkv, C, Dh]. Half floats if k_cache is an array of half floats, else floats.
struct Cache {
    Kind kind;
    Array keys, values;

    Cache(nb::handle k_cache, nb::handle v_cache, Access access)
        : kind(is_half(k_cache) ? Kind::kFloat16 : Kind::kFloat32),
          keys(k_cache, "k_cache", kind, 4, access),
          values(v_cache, "v_cache", kind, 4, access) {
        values.expect({keys.size(0), keys.size(1), keys.size(2), keys.size(3)});
    }

    int64_t heads() const { return keys.size(1); }
    int64_t context() const { return keys.size(2); }
    int64_t head_size() const { return keys.size(3); }
    KeysAndValues view() const { return {keys.data<void>(), values.data<void>(), kind == Kind::kFloat16, context()}; }
};

// Where tokens are in the cache. ends: end of the positions that each token sees; None: its own position + 1.
struct Places {
    Array slots, positions;
    MaybeArray ends;

    Places(nb::handle slots_object, nb::handle positions_object, nb::handle ends_object, const Cache& cache, int64_t tokens)
        : slots(slots_object, "slots", Kind::kInt32, 1),
          positions(positions_object, "positions", Kind::kInt32, 1),
          ends(ends_object, "ends", Kind::kInt32, 1) {
        slots.expect({tokens});
        positions.expect({tokens});
        slots.expect_indices(cache.keys.size(0));
        positions.expect_indices(cache.context());
    }

    TokenPlaces view() const { return {slots.data<const int32_t>(), positions.data<const int32_t>(), ends.data<int32_t>()}; }

    void check_ends(const Cache& cache, int64_t window) const {
        if (!ends) {
            return;
        }
        const int64_t tokens = slots.size(0);
        ends.expect({tokens});
        ends->expect_indices(cache.context() + 1);
        const int32_t* const all = ends.data<int32_t>();
        if (window != 0 || std::any_of(all, all + tokens, [](int32_t end) { return end < 1; })) {
            refuse("ends: expected at least 1, and no window");
        }
    }
};

void expect_window(int64_t window) {
    if (window < 0) {
        refuse("window: expected 0 or more, found " + std::to_string(window));
    }
}

void bind_rope(nb::handle x_object, nb::handle cos_object, nb::handle sin_object, nb::handle positions_object,
               bool is_interleaved) {
    const Array x(x_object, "x", Kind::kFloat32, 3, Access::kWrite), positions(positions_object, "positions", Kind::kInt32, 1);
    const Array cos(cos_object, "cos", Kind::kFloat32, 2), sin(sin_object, "sin", Kind::kFloat32, 2);
    sin.expect({cos.size(0), cos.size(1)});
    positions.expect({x.size(0)});
    positions.expect_indices(cos.size(0));
    expect_rotated(cos.size(1), x.size(2));
    const RopeCall call{x.data<float>(), cos.data<const float>(), sin.data<const float>(), positions.data<const int32_t>(),
                        x.size(1),       x.size(2),               cos.size(1),             is_interleaved};
    bool has_memory;
    {
        nb::gil_scoped_release unlocked;
        has_memory = rope(call, x.size(0));
    }
    expect_memory(has_memory);
}

void bind_store_kv(nb::handle k_object, nb::handle v_object, nb::handle k_cache, nb::handle v_cache, nb::handle slots,
                   nb::handle positions) {
    const Array k(k_object, "k", Kind::kFloat32, 3), v(v_object, "v", Kind::kFloat32, 3);
    const Cache cache(k_cache, v_cache, Access::kWrite);
    const Places places(slots, positions, nb::none(), cache, k.size(0));
    k.expect({k.size(0), cache.heads(), cache.head_size()});
    v.expect({k.size(0), cache.heads(), cache.head_size()});
    cache.keys.expect_apart(k);
    cache.values.expect_apart(v);
    nb::gil_scoped_release unlocked;
    store_kv({k.data<const float>(), v.data<const float>(), cache.heads(), cache.head_size(), k.size(0)}, cache.view(),
             places.slots.data<const int32_t>(), places.positions.data<const int32_t>());
}

void attend_cache(nb::handle q_object, nb::handle k_cache, nb::handle v_cache, nb::handle slots, nb::handle positions,
                    float scale, int64_t window, nb::handle out_object, nb::handle sinks_object, nb::handle ends,
                    nb::handle bias_object) {
    const Array q(q_object, "q", Kind::kFloat32, 3), out(out_object, "out", Kind::kFloat32, 3, Access::kWrite);
    const Cache cache(k_cache, v_cache, Access::kRead);
    const Places places(slots, positions, ends, cache, q.size(0));
    out.expect({q.size(0), q.size(1), q.size(2)});
    if (cache.heads() == 0 || q.size(1) % cache.heads() != 0 || q.size(2) != cache.head_size()) {
        refuse("q: expected heads a multiple of " + std::to_string(cache.heads()) + " and size " +
               std::to_string(cache.head_size()));
    }
    expect_window(window);
    places.check_ends(cache, window);
    const MaybeArray sinks(sinks_object, "sinks", Kind::kFloat32, 1), bias(bias_object, "bias", Kind::kFloat32, 2);
    sinks.expect({q.size(1)});
    bias.expect({q.size(1), 2 * cache.context() - 1});
    const AttentionCall call{q.data<const float>(),
                             cache.keys.data<const void>(),
                             cache.values.data<const void>(),
                             cache.kind == Kind::kFloat16,
                             places.slots.data<const int32_t>(),
                             places.positions.data<const int32_t>(),
                             out.data<float>(),
                             q.size(1),
                             cache.heads(),
                             cache.head_size(),
                             cache.context(),
                             window,
                             scale,
                             sinks.data<float>(),
                             places.ends.data<int32_t>(),
                             bias.data<float>()};
    bool has_memory;
    {
        nb::gil_scoped_release unlocked;
        has_memory = attention(call, q.size(0));
    }
    expect_memory(has_memory);
}

// Checks the arguments of a call and runs the layer without the interpreter lock.
template <class Layer>
void attend_checked(const Layer& layer, int64_t size, const Cache& cache, const Vectors& vectors, int64_t window,
                    nb::handle hidden_object, nb::handle slots, nb::handle positions, nb::handle ends) {
    const Array hidden(hidden_object, "hidden", Kind::kFloat32, 2, Access::kWrite);
    hidden.expect({hidden.size(0), size});
    const Places places(slots, positions, ends, cache, hidden.size(0));
    places.check_ends(cache, window);
    if (layer.rotation.cos != nullptr) {
        places.positions.expect_indices(vectors.positions);
    }
    bool has_memory;
    {
        nb::gil_scoped_release unlocked;
        has_memory = attend(layer, hidden.data<float>(), hidden.size(0), cache.view(), places.view());
    }
    expect_memory(has_memory);
}

// Weights of a layer, kept alive. Their shapes are checked once, here.
class AttentionLayer {
  public:
    AttentionLayer(nb::tuple norm, float norm_eps, nb::tuple matrices, nb::tuple biases, nb::tuple head_norms,
                   float head_norm_eps, nb::object rotation, bool is_interleaved, int64_t kv_heads, int64_t head_size,
                   float scale, int64_t window, nb::object sinks, nb::object distance_bias, nb::object gate,
                   const std::string& gate_function, nb::object value_norm, float residual_scale) {
        if (norm.size() != 3 || matrices.size() != 4 || biases.size() != 4 || head_norms.size() != 2) {
            refuse("attention: expected three vectors of norms, four matrices, four biases, two norms of heads");
        }
        MatrixView* const views[] = {&view_.query, &view_.key, &view_.value, &view_.output};
        for (size_t i = 0; i < 4; ++i) {
            if (i != 2 || !matrices[i].is_none()) {
                matrices_.take(matrices[i], *views[i]);
            }
        }
        take_heads(kv_heads, head_size, matrices[2].is_none());
        const int64_t size = view_.query.columns, query_size = view_.query.rows, key_size = view_.key.rows;
        view_.ends = vectors_.ends(norm, norm_eps, residual_scale, size);
        for (size_t i = 0; i < 4; ++i) {
            view_.biases[i] = vectors_.take(biases[i], "biases", {i == 0 ? query_size : i == 3 ? size : key_size});
        }
        take_head_norms(head_norms);
        take_gate(gate, gate_function);
        view_.value_norm = vectors_.take(value_norm, "value_norm", {head_size});
        view_.rotation = vectors_.rotation(rotation, is_interleaved, head_size);
        view_.sinks = vectors_.take(sinks, "sinks", {view_.heads});
        distance_bias_ = MaybeArray(distance_bias, "bias", Kind::kFloat32, 2);
        view_.distance_bias = distance_bias_.data<float>();
        expect_window(window);
        view_.head_norm_eps = head_norm_eps;
        view_.scale = scale;
        view_.window = window;
    }

    void attend(nb::handle hidden, nb::handle k_cache, nb::handle v_cache, nb::handle slots, nb::handle positions,
                nb::handle ends) const {
        const Cache cache(k_cache, v_cache, Access::kWrite);
        cache.keys.expect({cache.keys.size(0), view_.kv_heads, cache.context(), view_.head_size});
        distance_bias_.expect({view_.heads, 2 * cache.context() - 1});
        matrices_.rebind();
        attend_checked(view_, view_.output.rows, cache, vectors_, view_.window, hidden, slots, positions, ends);
    }

  private:
    void take_heads(int64_t kv_heads, int64_t head_size, bool values_are_keys) {
        const bool is_right = kv_heads > 0 && head_size > 0 && view_.key.rows == kv_heads * head_size && view_.query.rows > 0 &&
                              view_.query.rows % view_.key.rows == 0;
        if (!is_right) {
            refuse("key: expected rows for " + std::to_string(kv_heads) + " heads of " + std::to_string(head_size) +
                   ", and a whole number of queries for each, found " + std::to_string(view_.key.rows) + " and " +
                   std::to_string(view_.query.rows));
        }
        const int64_t size = view_.query.columns;
        const bool fits = values_are_keys || (view_.value.columns == size && view_.value.rows == view_.key.rows);
        if (view_.key.columns != size || !fits ||
            view_.output.rows != size || view_.output.columns != view_.query.rows) {
            refuse("query, key, value and output: expected Q x D, K x D, K x D and D x Q");
        }
        view_.kv_heads = kv_heads;
        view_.head_size = head_size;
        view_.heads = view_.query.rows / head_size;
    }

    void take_gate(const nb::object& gate, const std::string& function) {
        view_.is_softplus = function == "softplus";
        if (!view_.is_softplus && function != "sigmoid") {
            refuse("gate_function: expected sigmoid or softplus, found " + function);
        }
        if (gate.is_none()) {
            return;
        }
        matrices_.take(gate, view_.gate);
        if (view_.gate.columns != view_.query.columns ||
            (view_.gate.rows != view_.heads && view_.gate.rows != view_.query.rows)) {
            refuse("gate: expected rows for " + std::to_string(view_.heads) + " heads or " + std::to_string(view_.query.rows) +
                   " features, found " + std::to_string(view_.gate.rows));
        }
    }

    void take_head_norms(const nb::tuple& norms) {
        const bool has_them = !norms[0].is_none() && !norms[1].is_none();
        view_.norms_whole_rows = has_them && static_cast<int64_t>(nb::len(nb::handle(norms[0]))) != view_.head_size;
        view_.query_norm = vectors_.take(norms[0], "query_norm", {view_.norms_whole_rows ? view_.query.rows : view_.head_size});
        view_.key_norm = vectors_.take(norms[1], "key_norm", {view_.norms_whole_rows ? view_.key.rows : view_.head_size});
    }

    Matrices matrices_;
    Vectors vectors_;
    MaybeArray distance_bias_;
    AttentionLayerView view_{};
};

// The same for latent attention, whose heads share one vector.
class LatentLayer {
  public:
    LatentLayer(nb::tuple norm, float norm_eps, nb::object query_down, nb::object query, nb::object latent_down,
                nb::tuple inner_norms, float inner_norm_eps, nb::tuple key_up, nb::tuple value_up, nb::object output,
                nb::tuple rotation, bool is_interleaved, float scale, float residual_scale) {
        matrices_.take(query, view_.query);
        matrices_.take(latent_down, view_.latent_down);
        matrices_.take(output, view_.output);
        take_heads(key_up, value_up);
        const int64_t size = view_.latent_down.columns, rank = key_up_[0].rows;
        if (!query_down.is_none()) {
            matrices_.take(query_down, query_down_);
            view_.query_down = &query_down_;
        }
        if (inner_norms.size() != 2 || size != view_.output.rows ||
            view_.query.columns != (view_.query_down ? query_down_.rows : size) ||
            (view_.query_down && query_down_.columns != size)) {
            refuse("query_down, query, latent_down and output: expected D features of the stream, and two inner norms");
        }
        if (view_.query_down != nullptr) {
            view_.query_down_norm = vectors_.take_present(inner_norms[0], "query_down_norm", {query_down_.rows});
        }
        view_.latent_norm = vectors_.take_present(inner_norms[1], "latent_norm", {rank});
        view_.ends = vectors_.ends(norm, norm_eps, residual_scale, size);
        view_.rotation = vectors_.rotation(rotation, is_interleaved, view_.latent_down.rows - rank);
        view_.inner_norm_eps = inner_norm_eps;
        view_.scale = scale;
    }

    void attend(nb::handle hidden, nb::handle k_cache, nb::handle v_cache, nb::handle slots, nb::handle positions,
                nb::handle ends) const {
        const Cache cache(k_cache, v_cache, Access::kWrite);
        cache.keys.expect({cache.keys.size(0), 1, cache.context(), view_.latent_down.rows});
        matrices_.rebind();
        attend_checked(view_, view_.output.rows, cache, vectors_, 0, hidden, slots, positions, ends);
    }

  private:
    // One matrix per head and direction. All matrices of a direction have the same size.
    void take_heads(const nb::tuple& key_up, const nb::tuple& value_up) {
        if (key_up.size() == 0 || key_up.size() != value_up.size()) {
            refuse("key_up and value_up: expected a matrix for each head");
        }
        key_up_.resize(key_up.size());
        value_up_.resize(value_up.size());
        for (size_t h = 0; h < key_up.size(); ++h) {
            const MatrixView& key = matrices_.take(key_up[h], key_up_[h]);
            const MatrixView& value = matrices_.take(value_up[h], value_up_[h]);
            if (key.rows != key_up_[0].rows || key.columns != key_up_[0].columns || value.rows != value_up_[0].rows ||
                value.columns != key.rows) {
                refuse("key_up and value_up: expected Q x P and V x Q for every head");
            }
        }
        view_.heads = static_cast<int64_t>(key_up.size());
        view_.key_up = key_up_.data();
        view_.value_up = value_up_.data();
        const int64_t rotated = view_.latent_down.rows - key_up_[0].rows;
        if (rotated < 0 || view_.query.rows != view_.heads * (key_up_[0].columns + rotated) ||
            view_.output.columns != view_.heads * value_up_[0].rows) {
            refuse("query, latent_down and output: expected H (P + R), Q + R and H V features");
        }
    }

    Matrices matrices_;
    Vectors vectors_;
    MatrixView query_down_{};
    std::vector<MatrixView> key_up_, value_up_;
    LatentLayerView view_{};
};

}  // namespace

void bind_attention(nb::module_& module) {
    using namespace nanobind::literals;
    module.def("rope", bind_rope, "x"_a, "cos"_a, "sin"_a, "positions"_a, "interleaved"_a = false);
    module.def("store_kv", bind_store_kv, "k"_a, "v"_a, "k_cache"_a, "v_cache"_a, "slots"_a, "positions"_a);
    module.def("attention", attend_cache, "q"_a, "k_cache"_a, "v_cache"_a, "slots"_a, "positions"_a, "scale"_a, "window"_a,
               "out"_a, "sinks"_a = nb::none(), "ends"_a = nb::none(), "bias"_a = nb::none());
    nb::class_<AttentionLayer>(module, "AttentionLayer")
        .def(nb::init<nb::tuple, float, nb::tuple, nb::tuple, nb::tuple, float, nb::object, bool, int64_t, int64_t, float,
                      int64_t, nb::object, nb::object, nb::object, std::string, nb::object, float>(),
             "norm"_a, "norm_eps"_a, "matrices"_a, "biases"_a, "head_norms"_a, "head_norm_eps"_a, "rotation"_a.none(),
             "interleaved"_a, "kv_heads"_a, "head_size"_a, "scale"_a, "window"_a, "sinks"_a.none(), "distance_bias"_a.none(),
             "gate"_a.none(), "gate_function"_a, "value_norm"_a.none(), "residual_scale"_a)
        .def("attend", &AttentionLayer::attend, "hidden"_a, "k_cache"_a, "v_cache"_a, "slots"_a, "positions"_a,
             "ends"_a = nb::none());
    nb::class_<LatentLayer>(module, "LatentLayer")
        .def(nb::init<nb::tuple, float, nb::object, nb::object, nb::object, nb::tuple, float, nb::tuple, nb::tuple, nb::object,
                      nb::tuple, bool, float, float>(),
             "norm"_a, "norm_eps"_a, "query_down"_a.none(), "query"_a, "latent_down"_a, "inner_norms"_a, "inner_norm_eps"_a,
             "key_up"_a, "value_up"_a, "output"_a, "rotation"_a, "interleaved"_a, "scale"_a, "residual_scale"_a)
        .def("attend", &LatentLayer::attend, "hidden"_a, "k_cache"_a, "v_cache"_a, "slots"_a, "positions"_a,
             "ends"_a = nb::none());
}

}  // namespace moec
