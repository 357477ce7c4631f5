#pragma once

#include <nanobind/nanobind.h>

void bind_sparse(nanobind::module_& module);
