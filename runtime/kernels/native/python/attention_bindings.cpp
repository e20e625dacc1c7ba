// Bindings of the single steps of attention. Shapes and meanings: runtime/kernels/reference/.

#include "python/attention_bindings.h"

#include "attention/attention_arguments.h"

namespace moec {
namespace {

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

void bind_attention(nb::handle q_object, nb::handle k_cache, nb::handle v_cache, nb::handle slots, nb::handle positions,
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

}  // namespace

void bind_attention_steps(nb::module_& module) {
    using namespace nanobind::literals;
    module.def("rope", bind_rope, "x"_a, "cos"_a, "sin"_a, "positions"_a, "interleaved"_a = false);
    module.def("store_kv", bind_store_kv, "k"_a, "v"_a, "k_cache"_a, "v_cache"_a, "slots"_a, "positions"_a);
    module.def("attention", bind_attention, "q"_a, "k_cache"_a, "v_cache"_a, "slots"_a, "positions"_a, "scale"_a, "window"_a,
               "out"_a, "sinks"_a = nb::none(), "ends"_a = nb::none(), "bias"_a = nb::none());
}

}  // namespace moec
