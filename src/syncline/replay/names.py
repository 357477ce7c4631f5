"""Names of gradients that a torch module can have, and plans under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from torch import nn

from syncline.model.plan import Plan

__all__ = ["OWN_ATTRIBUTES", "module_names", "renamed_plan"]

OWN_ATTRIBUTES = ("clock", "gradient_names", "optimizer", "profile", "work")
"""Public attributes of :class:`~syncline.replay.model.Replayed`; the others have underscores."""
RESERVED = frozenset([*dir(nn.Module()), *OWN_ATTRIBUTES])
"""Attributes that modules have; torch refuses a parameter or submodule of such a name."""


def module_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name under which each gradient's parameter stands in a module.

    The parts between dots name submodules, the last one the parameter. Names stay as they are, with
    spaces and slashes too, but for those that cannot: a name of one part, whose parameter would
    belong to the outermost module and so be needed before everything else, gets the part
    ``weight``; a part that is empty, begins with an underscore or is an attribute of every module
    gets an underscore behind it; and so does the parameter, as often as it takes, where another
    has its name or a submodule has.

    Args:
        names: all different.

    Returns:
        A name for each, all different, in the same order.
    """
    paths = [[_allowed(part) for part in name.split(".")] for name in names]
    for path in paths:
        if len(path) == 1:
            path.append("weight")
    modules = {tuple(path[:depth]) for path in paths for depth in range(1, len(path))}
    taken: set[tuple[str, ...]] = set()
    # Names that can stay are placed first, so that only the others give way.
    for _, path in sorted(zip(names, paths, strict=True), key=lambda p: ".".join(p[1]) != p[0]):
        while tuple(path) in modules or tuple(path) in taken:
            path[-1] += "_"
        taken.add(tuple(path))
    return {name: ".".join(path) for name, path in zip(names, paths, strict=True)}


def _allowed(part: str) -> str:
    return f"{part}_" if not part or part in RESERVED or part.startswith("_") else part


def renamed_plan(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the plan with other names of its tensors, which must all be among ``names``."""
    tensors = tuple(msgspec.structs.replace(t, name=names[t.name]) for t in plan.tensors)
    return msgspec.structs.replace(plan, tensors=tensors)
