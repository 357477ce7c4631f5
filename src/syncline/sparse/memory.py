"""``Memory``: what an exchange does to the tensors of its rank, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from syncline.sparse.vector import SparseVector

__all__ = ["Memory", "Tracked", "Unit"]


class Tracked(NamedTuple):
    """What is kept of a parameter, and what is added to it; each of shape (elements,), float32."""

    residual: torch.Tensor
    gradient: torch.Tensor
    velocity: torch.Tensor | None = None
    """If momentum is corrected. Of the tensors that are selected from together, all have one, or
    none has."""


Unit = Sequence[Tracked]
"""What is selected from together: the parts of a vector, one after the other."""


class Memory(Protocol):
    """The tensors of one device; what is sent and what arrives is on the host.

    All tensors are contiguous float32, of shape (elements,). All forms give the same bits.
    """

    def first_not_finite(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Return which of the tensors is the first that holds an infinity or NaN."""

    def are_zero(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Say of each tensor whether all it has are zeros, and it has any."""

    def take(
        self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float
    ) -> SparseVector | int:
        """Add gradients to residuals, take out those of largest magnitude, and leave zeros.

        Of equal magnitudes the lower index is taken. Zeros are never taken, so there may be fewer.

        Args:
            units: which make up a vector, one after the other.
            counts: k, how many are taken of each unit, from 0 on; more than it has elements means
                all.
            momentum: of the velocities, where there are some: those become ``momentum * velocity +
                gradient``, are what is added, and are cleared where an element is taken.

        Returns:
            What was taken, of the length of all units; or the number of a unit in which an infinity
            or NaN came out of the addition, after which residuals are of no use. Nobody looks at
            units of which nothing is wanted.
        """

    def add(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Add the entries of a vector that these tensors make up one after the other."""

    def write(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Let these tensors, one after the other, be this vector."""
