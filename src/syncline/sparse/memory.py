"""``Memory``: what an exchange does to the tensors of its rank, on any device, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline.sparse.selection import SelectionPart, first_not_finite, select
from syncline.sparse.vector import SparseVector, joined


class Tracked(NamedTuple):
    """Residual and gradient of a parameter; each of shape (elements,), float32."""

    residual: Tensor
    gradient: Tensor
    velocity: Tensor | None = None
    """With momentum correction. Either all or none of the tensors of a unit have one."""


Unit = Sequence[Tracked]
"""Parts of a vector from which elements are selected together."""


class Memory(ABC):
    """Operations on the tensors of one device, beside the training's own; vectors are on the host.

    All tensors are contiguous float32, of shape (elements,). Subclasses give the same bits.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def mark(self) -> Any:
        """Mark the present moment in the device's work, for :meth:`after`."""
        return None

    @contextmanager
    def after(self, marks: Sequence[Any]) -> Iterator[None]:  # noqa: ARG002 - all is done already
        """Run the block once the marks are reached; its work is complete when the block ends.

        May be entered on several threads at once, for different tensors.
        """
        yield

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future of a tensor of the device."""
        return torch.futures.Future()

    @abstractmethod
    def first_not_finite(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the number of the first tensor that holds an infinity or NaN."""

    @abstractmethod
    def are_zero(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Say of each tensor whether it has elements and all are zeros."""

    @abstractmethod
    def take(
        self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float
    ) -> SparseVector | int:
        """Add gradients to residuals, take out those of largest magnitude, and leave zeros.

        Of equal magnitudes the lower index is taken. Zeros are never taken, so there may be fewer.

        Args:
            units: the parts of a vector.
            counts: k, how many are taken of each unit; at most all.
            momentum: of the velocities, if there are any: these become ``momentum * velocity +
                gradient``, and are added instead of gradients.

        Returns:
            The entries taken, of the length of all units; or the number of a unit in which the
            addition gave an infinity or NaN, after which residuals are useless. Units with a count
            of 0 are not checked.
        """

    @abstractmethod
    def add(self, tensors: Sequence[Tensor], vector: SparseVector) -> None:
        """Add the entries of a vector that is the concatenation of these tensors."""

    @abstractmethod
    def clear(self, tensors: Sequence[Tensor], vector: SparseVector) -> None:
        """Set the elements at a vector's entries to zero."""

    @abstractmethod
    def write(self, tensors: Sequence[Tensor], vector: SparseVector) -> None:
        """Set the concatenation of these tensors to this vector."""


ZERO_BLOCK = 1 << 14
"""Elements that are checked at once for one that is not zero."""


class HostMemory(Memory):
    """Memory of the host, by the native core: every operation is complete when it returns."""

    def first_not_finite(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the number of the first tensor that holds an infinity or NaN."""
        found = (first_not_finite(each.data_ptr(), each.numel()) for each in tensors)
        return next((number for number, first in enumerate(found) if first is not None), None)

    def are_zero(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Say of each tensor whether it has elements and all are zeros."""
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
            if found is None:
                return number
            if moves:
                self.clear([each.residual for each in unit], found)
            taken.append(found)
        return joined(taken)

    def add(self, tensors: Sequence[Tensor], vector: SparseVector) -> None:
        """Add the entries of a vector that is the concatenation of these tensors."""
        for tensor, part in _placed(tensors, vector):
            tensor.numpy()[part.indices] += part.values

    def clear(self, tensors: Sequence[Tensor], vector: SparseVector) -> None:
        """Set the elements at a vector's entries to zero."""
        for tensor, part in _placed(tensors, vector):
            tensor.numpy()[part.indices] = 0

    def write(self, tensors: Sequence[Tensor], vector: SparseVector) -> None:
        """Set the concatenation of these tensors to this vector."""
        for tensor, part in _placed(tensors, vector):
            tensor.zero_().numpy()[part.indices] = part.values


def _placed(
    tensors: Sequence[Tensor], vector: SparseVector
) -> Iterator[tuple[Tensor, SparseVector]]:
    """Yield each tensor with its part of a vector that is the concatenation of all."""
    return zip(tensors, vector.parts([tensor.numel() for tensor in tensors]), strict=True)


def _is_zero(values: Tensor) -> bool:
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
