"""Scaling, adding and rounding gradients in one pass over memory, where native code can."""

from __future__ import annotations

import torch

from syncline import _native

NATIVE = {torch.float32: 0, torch.bfloat16: 2}  # types in which native code adds what arrives


def scaled(values: torch.Tensor, factor: float, wire: torch.dtype) -> torch.Tensor:
    """Return ``factor * values`` rounded to ``wire``; the values may be overwritten.

    Values are contiguous. If ``wire`` is their own type, they are the result.
    """
    if not _is_native(values) or wire != torch.bfloat16:
        return values.mul_(factor).to(wire)
    result = torch.empty_like(values, dtype=wire)
    _native.scaled(values.data_ptr(), result.data_ptr(), values.numel(), factor)
    return result


def add_scaled(
    values: torch.Tensor, arrived: torch.Tensor, *, factor: float, last: bool
) -> torch.Tensor:
    """Return ``factor * values + arrived`` rounded to the type of ``arrived``.

    Both are contiguous and have the same size. Both may be overwritten, and the result may be one
    of them. If it is the last sum, it replaces the values, too.

    The product is rounded before the sum, as two operations of torch do it: a fused multiply-add
    would not cancel equal gradients of opposite signs as an all-reduce does.
    """
    dtype = NATIVE.get(arrived.dtype)
    if dtype is not None and _is_native(values):
        addresses = values.data_ptr(), arrived.data_ptr()
        _native.add_scaled(dtype, *addresses, values.numel(), factor, last=last)
        return values if arrived.dtype == values.dtype else arrived
    total = values.mul_(factor).add_(arrived.to(values.dtype)).to(arrived.dtype)
    if last:
        values.copy_(total)
    return total


def _is_native(values: torch.Tensor) -> bool:
    return values.dtype == torch.float32 and values.device.type == "cpu"
