// What the expert cache has in the extension: `_native.ExpertReads`.

#pragma once

#include <nanobind/nanobind.h>

namespace moec {

void bind_cache(nanobind::module_& module);

}  // namespace moec
