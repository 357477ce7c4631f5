"""What can be reached from a value that an optimizer keeps."""

from __future__ import annotations

import gc
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

__all__ = ["find_shared"]

MOST_OBJECTS = 100_000
LEAVES = (type, types.ModuleType, types.CodeType, logging.Logger, str, bytes, int, float, complex)
"""What is not looked into: it belongs to the program, not to the value."""


def find_shared(
    value: object,
    owner: Optimizer,
    *,
    hyper: Callable[[torch.Tensor], bool] = lambda _: False,
) -> str | None:
    """Say what in ``value`` several parameters of an optimizer could share, or None.

    Looks into containers, objects, closures and weak references, and at nothing twice.

    Args:
        value: where to look.
        owner: the optimizer that keeps it; it may refer to itself.
        hyper: whether a tensor of one element counts as a hyper-parameter.

    Returns:
        ``"a tensor"``, ``"another optimizer"``, ``"a process group"`` or, where there are over
        100,000 objects, ``"too much to look through"``.
    """
    seen = {id(owner)}
    # Held until the end: the id of a freed object could be that of the next.
    held: list[object] = []
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, LEAVES):
            continue
        if isinstance(found, torch.Tensor):
            if found.numel() == 1 and hyper(found):
                continue
            return "a tensor"
        if isinstance(found, Optimizer):
            return "another optimizer"
        if isinstance(found, dist.ProcessGroup):
            return "a process group"
        if len(held) == MOST_OBJECTS:
            return "too much to look through"
        seen.add(id(found))
        held.append(found)
        waiting += _parts(found)
    return None


def _parts(value: object) -> list[Any]:
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, types.FunctionType):  # its globals are the whole program
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)
