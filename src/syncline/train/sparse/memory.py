"""``Memory``: the operations of an exchange on its rank's tensors, on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline import _native
from syncline.errors import UserError
from syncline.torch_private import foreach_zero_
from syncline.train.sparse.vector import SparseVector, joined

INSTRUCTIONS = {"widest": -1, "portable": 0, "avx2": 1, "avx512": 2}
"""Sets of vector instructions, by the native core's number. All give the same bits."""
WIDEST = INSTRUCTIONS["widest"]


class Tracked(NamedTuple):
    """Residual and gradient of a parameter; each of shape (elements,), float32."""

    residual: Tensor
    gradient: Tensor
    velocity: Tensor | None = None  # with momentum correction; of all tensors of a unit or none


Unit = Sequence[Tracked]  # parts of a vector from which elements are selected together
Taken = SparseVector | int  # the entries taken, or the number of a unit that has overflowed
Placed = Iterable[tuple[Any, Any, Any]]  # tensors or their arrays, with indices and values


class Memory(ABC):
    """Operations on the tensors of one device; vectors are on the host.

    All tensors are contiguous float32, of shape (elements,). Subclasses give the same bits.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def mark(self) -> Any:
        """Mark the current point in the device's work, for :meth:`after`."""
        return None

    @contextmanager
    def after(self, marks: Sequence[Any]) -> Iterator[None]:  # noqa: ARG002 - all is done already
        """Run the block once the marks are reached; its work is complete when the block ends.

        May be entered on several threads at once, for different tensors.
        """
        yield

    @abstractmethod
    def first_not_finite(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the number of the first tensor that holds an infinity or NaN."""

    @abstractmethod
    def are_zero(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Say of each tensor whether it has elements and all are zeros."""

    @abstractmethod
    def take(self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float) -> Taken:
        """Add gradients to residuals, take out those of largest magnitude, and leave zeros.

        Of equal magnitudes the lower index is taken. Zeros are never taken, so there may be fewer.

        Args:
            units: the parts of a vector.
            counts: k, how many are taken of each unit; at most all.
            momentum: of the velocities, if there are any: these become ``momentum * velocity +
                gradient``, and are added instead of gradients.

        Returns:
            The entries taken, of the length of all units; or the number of a unit, of a count above
            0, in which the addition gave an infinity or NaN. Residuals are useless then.
        """

    def add(self, tensors: Sequence[Tensor], vector: SparseVector) -> None:
        """Add the entries of a vector that is the concatenation of these tensors."""
        for values, indices, added in self._placed(tensors, vector):
            values[indices] += added  # each index occurs once

    def clear(self, tensors: Sequence[Tensor], vector: SparseVector) -> None:
        """Set the elements at a vector's entries to zero."""
        for values, indices, _ in self._placed(tensors, vector):
            values[indices] = 0

    def write(self, tensors: Sequence[Tensor], vector: SparseVector) -> None:
        """Set the concatenation of these tensors to this vector."""
        foreach_zero_([*tensors])
        for values, indices, written in self._placed(tensors, vector):
            values[indices] = written

    @abstractmethod
    def _placed(self, tensors: Sequence[Tensor], vector: SparseVector) -> Placed:
        """Return the tensors, or arrays of their memory, with indices and values for each."""


ZERO_BLOCK = 1 << 14  # elements that are checked at once for zeros


class HostMemory(Memory):
    """Memory of the host, by the native core: every operation is complete when it returns."""

    def first_not_finite(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the number of the first tensor that holds an infinity or NaN."""
        for number, each in enumerate(tensors):
            elements = each.numel()
            if _native.first_not_finite(each.data_ptr(), elements, WIDEST) < elements:
                return number
        return None

    def are_zero(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Say of each tensor whether it has elements and all are zeros."""
        return [values.numel() > 0 and _is_zero(values) for values in tensors]

    def take(self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float) -> Taken:
        """Add gradients to residuals, take out those of largest magnitude, in one pass a unit.

        Exact, in O(elements) for any data: a threshold is guessed from a sample, the elements above
        it are collected, and the k largest of them are taken.

        Source: for momentum, Deep Gradient Compression (Lin et al., 2018), section 3.2 and
        Algorithm 4; the selection is ours.
        """
        taken = []
        for number, (unit, k) in enumerate(zip(units, counts, strict=True)):
            length = sum(each.residual.numel() for each in unit)
            require_selectable(length)
            has_velocity = any(each.velocity is not None for each in unit)
            # At least and at most k, without a first threshold. The core's own clearing would also
            # clear velocities.
            indices, values, _, finite, _ = _native.select(
                [_addresses(each) for each in unit], momentum, k, k, k, 0, not has_velocity, WIDEST
            )
            if not finite:
                return number
            found = SparseVector(length, indices, values)
            if has_velocity:
                self.clear([each.residual for each in unit], found)
            taken.append(found)
        return joined(taken)

    def _placed(self, tensors: Sequence[Tensor], vector: SparseVector) -> Placed:
        parts = vector.parts([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            yield tensor.numpy(), part.indices, part.values


def _is_zero(values: Tensor) -> bool:
    # In blocks, since the first one nearly always holds an element that is not zero. torch's any()
    # reads all elements, and takes several times as long as the selection.
    elements = values.numpy()
    blocks = range(0, len(elements), ZERO_BLOCK)
    return not any(elements[start : start + ZERO_BLOCK].any() for start in blocks)


def _addresses(each: Tracked) -> tuple[int, int, int, int]:
    """Return the addresses of residual, gradient and velocity, or 0, and how many elements."""
    residual, gradient, velocity = (0 if t is None else t.data_ptr() for t in each)
    return residual, gradient, velocity, each.residual.numel()


def future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    """Return a future; on a GPU the waiting thread's stream waits for its values."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def require_selectable(elements: int) -> None:
    """Raise UserError if indices of this many elements need more than 32 bits."""
    if elements >= 2**32:
        raise UserError(f"{elements} elements are selected from; at most 2^32 - 1 can be")
