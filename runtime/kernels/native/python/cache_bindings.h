// Bindings of the expert cache, and of layers that compute with it: `_native.ExpertCache` and `_native.ExpertLayers`.

#pragma once

#include <nanobind/nanobind.h>

namespace moec {

void bind_cache(nanobind::module_& module);
void bind_expert_layers(nanobind::module_& module);

}  // namespace moec
