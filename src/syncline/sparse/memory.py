"""``Memory``: what an exchange does to the tensors of its rank, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from syncline.sparse.vector import SparseVector

__all__ = ["Memory", "Taken", "Tracked"]


class Tracked(NamedTuple):
    """What is kept of a parameter, and what is added to it; each of shape (elements,), float32."""

    residual: torch.Tensor
    gradient: torch.Tensor
    velocity: torch.Tensor | None = None
    """If momentum is corrected. Of the tensors that are selected from together, all have one, or
    none has."""


class Taken(NamedTuple):
    """What was taken out of residuals."""

    vector: SparseVector
    finite: bool
    """Whether all residuals are, after the addition; else nothing was taken. Nobody looks where
    nothing is wanted."""


class Memory(Protocol):
    """The tensors of one device; what is sent and what arrives is on the host.

    All tensors are contiguous float32, of shape (elements,). All forms give the same bits.
    """

    def first_not_finite(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Return which of the tensors is the first that holds an infinity or NaN."""

    def are_zero(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Say of each tensor whether all it has are zeros, and it has any."""

    def take(self, unit: Sequence[Tracked], k: int, *, momentum: float) -> Taken:
        """Add gradients to residuals, take out the k of largest magnitude, and leave zeros.

        Of equal magnitudes the lower index is taken. Zeros are never taken, so there may be fewer.

        Args:
            unit: what is selected from together: the parts of a vector, one after the other.
            k: how many, from 0 on; more than there are elements means all.
            momentum: of the velocities, where there are some: those become ``momentum * velocity +
                gradient``, are what is added, and are cleared where an element is taken.
        """

    def add(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Add the entries of a vector that these tensors make up one after the other."""

    def write(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Let these tensors, one after the other, be this vector."""
