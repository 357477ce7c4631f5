"""``Gradient``: one parameter's gradient in a message."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Gradient", "flat", "shaped"]


class Gradient(NamedTuple):
    """A parameter's gradient, contiguous float32 on the CPU or a GPU."""

    name: str
    values: torch.Tensor
    """Of shape (elements,); becomes the average."""


def flat(values: torch.Tensor) -> torch.Tensor:
    """Return a gradient as it lies in its bucket, of shape (elements,), without a copy.

    Channels-last gradients have no view of one dimension.
    """
    return values.as_strided((values.numel(),), (1,), values.storage_offset())


def shaped(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what lies as :func:`flat` has it in the shape and strides of another, uncopied."""
    return values.as_strided(like.shape, like.stride())
