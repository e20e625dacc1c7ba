// Bindings of looking ahead: scores of later routers, and the largest of them.

#pragma once

#include <nanobind/nanobind.h>

namespace moec {

void bind_lookahead(nanobind::module_& module);

}  // namespace moec
