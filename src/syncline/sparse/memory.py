"""``Memory``: what an exchange does to the tensors of its rank, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from syncline.sparse.selection import SelectionPart, first_not_finite, select
from syncline.sparse.vector import SparseVector, joined

__all__ = ["HostMemory", "Memory", "Tracked", "Unit"]


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
                gradient``, and are what is added.

        Returns:
            What was taken, of the length of all units; or the number of a unit in which an infinity
            or NaN came out of the addition, after which residuals are of no use. Nobody looks at
            units of which nothing is wanted.
        """

    def add(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Add the entries of a vector that these tensors make up one after the other."""

    def clear(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Set to zero what a vector has entries of, which these tensors make up."""

    def write(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Let these tensors, one after the other, be this vector."""


ZERO_BLOCK = 1 << 14
"""Elements that are looked at together for one that is not zero."""


class HostMemory:
    """:class:`~syncline.sparse.memory.Memory` of the host."""

    def first_not_finite(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Return which of the tensors is the first that holds an infinity or NaN."""
        for number, values in enumerate(tensors):
            if first_not_finite(values.data_ptr(), values.numel()) is not None:
                return number
        return None

    def are_zero(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Say of each tensor whether all it has are zeros."""
        return [values.numel() > 0 and _is_zero(values) for values in tensors]

    def take(
        self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float
    ) -> SparseVector | int:
        """Add gradients to residuals, take out those of largest magnitude, in one pass a unit."""
        taken = []
        for number, (unit, k) in enumerate(zip(units, counts, strict=True)):
            moves = any(each.velocity is not None for each in unit)
            # Velocities go on, so what is taken is cleared here.
            parts = [_part(each) for each in unit]
            found = select(parts, k, momentum=momentum, clear=not moves)
            if not found.finite:
                return number
            if moves:
                self.clear([each.residual for each in unit], found.taken)
            taken.append(found.taken)
        return joined(taken)

    def add(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Add the entries of a vector that these tensors make up one after the other."""
        lengths = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, vector.parts(lengths), strict=True):
            tensor.numpy()[part.indices] += part.values

    def clear(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Set to zero what a vector has entries of, which these tensors make up."""
        lengths = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, vector.parts(lengths), strict=True):
            tensor.numpy()[part.indices] = 0

    def write(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Let these tensors, one after the other, be this vector."""
        lengths = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, vector.parts(lengths), strict=True):
            tensor.zero_().numpy()[part.indices] = part.values


def _is_zero(values: torch.Tensor) -> bool:
    # Nearly always the first block says no. torch's any() looks at all of them, and takes several
    # times as long as the selection.
    elements = values.numpy()
    blocks = range(0, len(elements), ZERO_BLOCK)
    return not any(elements[start : start + ZERO_BLOCK].any() for start in blocks)


def _part(each: Tracked) -> SelectionPart:
    """Return what :func:`select` works on; the tensors must outlive it."""
    return SelectionPart(
        each.residual.data_ptr(),
        each.residual.numel(),
        each.gradient.data_ptr(),
        0 if each.velocity is None else each.velocity.data_ptr(),
    )
