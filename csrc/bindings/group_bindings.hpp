#pragma once

#include <nanobind/nanobind.h>

void bind_groups(nanobind::module_& module);
