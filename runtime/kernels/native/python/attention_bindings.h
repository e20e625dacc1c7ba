// Bindings of attention: its single steps, and layers that do all steps in one call.

#pragma once

#include <nanobind/nanobind.h>

namespace moec {

void bind_attention_steps(nanobind::module_& module);
void bind_attention_layers(nanobind::module_& module);

}  // namespace moec
