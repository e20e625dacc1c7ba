// What looking ahead has in the extension: what later routers would choose, and the first of their choice.

#pragma once

#include <nanobind/nanobind.h>

namespace moec {

void bind_lookahead(nanobind::module_& module);

}  // namespace moec
