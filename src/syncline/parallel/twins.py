"""Small twins of an optimizer's parameters and state, and whether two of them came out the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["PLAIN", "corner", "kind_of_parameter", "moving", "normal", "same", "small"]

SIDE = 3
"""Elements that a dimension of a twin's parameter has at most."""
LEAST_RATE = 0.1
"""What smaller learning rates are raised to: a warm-up that begins at 0 would hide everything."""
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def kind_of_parameter(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return what decides how a parameter is updated, beside its group."""
    return parameter.ndim, parameter.dtype, parameter.device, parameter.requires_grad


def same(ours: Any, theirs: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Say whether two values are of the same make, with tensors equal to the last bit.

    Values that say nothing of what they hold (a function, a lock) count as the same, and so do the
    optimizers that values refer to: they are compared themselves.
    """
    seen = set() if seen is None else seen
    pair = (id(ours), id(theirs))
    if ours is theirs or pair in seen:
        return True
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, PLAIN):
        return bool(ours == theirs) or (ours != ours and theirs != theirs)
    if isinstance(ours, torch.Tensor):
        if (ours.shape, ours.dtype, ours.device) != (theirs.shape, theirs.dtype, theirs.device):
            return False
        return torch.equal(_bits(ours), _bits(theirs))
    seen.add(pair)
    if isinstance(ours, Mapping):
        if ours.keys() == theirs.keys():
            return all(same(ours[key], theirs[key], seen) for key in ours)
        # Keys that are copies of one object are not equal, but stand in the same place.
        return same(list(ours.items()), list(theirs.items()), seen)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(
            same(a, b, seen) for a, b in zip(ours, theirs, strict=True)
        )
    if isinstance(ours, set | frozenset):
        return {v for v in ours if isinstance(v, PLAIN)} == {
            v for v in theirs if isinstance(v, PLAIN)
        }
    if hasattr(ours, "__dict__") and not isinstance(ours, Optimizer):
        return same(dict(vars(ours)), dict(vars(theirs)), seen)
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: equal also where it is not a number."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def moving(group: dict[str, Any]) -> dict[str, Any]:
    """Raise a group's learning rate so that every step can be seen in 16 bits as well."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        group["lr"] = rate.clamp(min=LEAST_RATE)
    elif isinstance(rate, float | int):
        group["lr"] = max(float(rate), LEAST_RATE)
    return group


def small(
    parameter: nn.Parameter, generator: torch.Generator, device: torch.device | None = None
) -> nn.Parameter:
    """Return a parameter that looks like the given one, with at most three a dimension.

    Args:
        parameter: the given one.
        generator: draws its values.
        device: where it shall be, instead of where the given one is.
    """
    shape = tuple(min(side, SIDE) for side in parameter.shape)
    like = torch.empty(shape, dtype=parameter.dtype, device=device or parameter.device)
    twin = nn.Parameter(normal(like, generator), requires_grad=parameter.requires_grad)
    # Marks that say how to treat a parameter, such as one for no weight decay.
    marks = {n: v for n, v in getattr(parameter, "__dict__", {}).items() if isinstance(v, PLAIN)}
    vars(twin).update(marks)
    return twin


def normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return normal deviates, drawn on the CPU so that every device gets the same."""
    drawn = torch.float64 if not like.is_complex() else torch.complex128
    return torch.randn(like.shape, dtype=drawn, device="cpu", generator=generator).to(like)


def corner(state: Any, device: torch.device | None = None) -> Any:
    """Copy the first three elements of every dimension of all tensors in a parameter's state.

    Args:
        state: the state.
        device: where the copies shall be, instead of where the tensors are.
    """
    if isinstance(state, torch.Tensor):
        part = state.detach()[(slice(SIDE),) * state.ndim]
        return part.to(device or part.device, copy=True)
    if isinstance(state, Mapping):
        return {key: corner(value, device) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(corner(value, device) for value in state)
    return copy.deepcopy(state)
