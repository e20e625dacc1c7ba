// What attention has in the extension: its steps, and layers that have all of them in one.

#pragma once

#include <nanobind/nanobind.h>

namespace moec {

void bind_attention_steps(nanobind::module_& module);
void bind_attention_layers(nanobind::module_& module);

}  // namespace moec
