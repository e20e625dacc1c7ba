// The parts of the module `_native`: each adds its functions and classes.

#pragma once

#include <nanobind/nanobind.h>

namespace moec {

// The single steps of attention, and layers that do all steps in one call.
void bind_attention(nanobind::module_& module);
// Layers with a recurrent state.
void bind_recurrent_layers(nanobind::module_& module);
// `_native.ExpertCache` and `_native.ExpertLayers`.
void bind_cache(nanobind::module_& module);
void bind_expert_layers(nanobind::module_& module);
// The steps of a quantizer.
void bind_quantizer(nanobind::module_& module);

}  // namespace moec
