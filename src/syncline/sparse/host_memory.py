"""``HostMemory``: tensors of the CPU, by the native core."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.sparse.memory import Tracked, Unit
from syncline.sparse.selection import Part, first_not_finite, select
from syncline.sparse.vector import SparseVector, joined

__all__ = ["HostMemory"]


class HostMemory:
    """:class:`~syncline.sparse.memory.Memory` of the host."""

    def first_not_finite(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Return which of the tensors is the first that holds an infinity or NaN."""
        for number, values in enumerate(tensors):
            if first_not_finite(values.data_ptr(), values.numel()) is not None:
                return number
        return None

    def are_zero(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Say of each tensor whether all it has are zeros; nearly always the first says no."""
        return [
            values.numel() > 0 and float(values[0]) == 0 and not bool(values.any())
            for values in tensors
        ]

    def take(
        self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float
    ) -> SparseVector | int:
        """Add gradients to residuals, take out those of largest magnitude, in one pass a unit."""
        taken = []
        for number, (unit, k) in enumerate(zip(units, counts, strict=True)):
            found = select([_part(each) for each in unit], k, momentum=momentum)
            if not found.finite:
                return number
            taken.append(found.taken)
        return joined(taken)

    def add(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Add the entries of a vector that these tensors make up one after the other."""
        lengths = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, vector.parts(lengths), strict=True):
            tensor.numpy()[part.indices] += part.values

    def write(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Let these tensors, one after the other, be this vector."""
        lengths = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, vector.parts(lengths), strict=True):
            tensor.zero_().numpy()[part.indices] = part.values


def _part(each: Tracked) -> Part:
    """Return what :func:`select` works on; the tensors must outlive it."""
    return Part(
        each.residual.data_ptr(),
        each.residual.numel(),
        each.gradient.data_ptr(),
        0 if each.velocity is None else each.velocity.data_ptr(),
    )
