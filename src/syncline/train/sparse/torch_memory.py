"""``TorchMemory``: operations on residuals on any device, by torch; ``CudaMemory``: on a GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from syncline.torch_private import foreach_add_, foreach_copy_, foreach_mul_, foreach_norm
from syncline.train.sparse import memory
from syncline.train.sparse.memory import HostMemory, Memory, Taken, Tracked, Unit
from syncline.train.sparse.vector import SparseVector, joined

MAGNITUDE_BITS = 0x7FFFFFFF
logger = logging.getLogger("syncline")


class TorchMemory(Memory):
    """Memory of any device, by operations of torch on the current stream.

    One call handles several tensors, since launches would take longer than the work. Every result
    is copied from the device at once.
    """

    def first_not_finite(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the number of the first tensor that holds an infinity or NaN."""
        norms = _largest_of_each(tensors)
        return next((n for n, norm in enumerate(norms) if not math.isfinite(norm)), None)

    def are_zero(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Say of each tensor whether it has elements and all are zeros."""
        norms = _largest_of_each(tensors)
        return [t.numel() > 0 and norm == 0 for t, norm in zip(tensors, norms, strict=True)]

    def take(self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float) -> Taken:
        """Add gradients to residuals, take out those of largest magnitude, and leave zeros."""
        memory.require_selectable(sum(each.residual.numel() for unit in units for each in unit))
        every = [each for unit in moved_units(units, momentum) for each in unit]
        if not every:
            return SparseVector.empty(0)
        foreach_add_([each.residual for each in every], [each.gradient for each in every])
        taken = []
        for number, (unit, k) in enumerate(zip(units, counts, strict=True)):
            found = self.take_largest([each.residual for each in unit], k)
            if found is None:
                return number
            taken.append(found)
        return joined(taken)

    def largest(self, values: Tensor, k: int) -> Tensor:
        """Return the indices of the k largest magnitudes that are not zero, ascending; int64.

        Of equal magnitudes the lower index is taken. Infinity is the largest, except for NaN.
        """
        magnitude = values.view(torch.int32) & MAGNITUDE_BITS
        k = min(k, len(magnitude))
        if k == 0:
            return torch.empty(0, dtype=torch.int64, device=values.device)
        least = torch.topk(magnitude, k, sorted=False).values.amin()
        above, equal = magnitude > least, magnitude == least
        taken = above | (equal & (equal.cumsum(0) <= k - above.sum()))
        return torch.nonzero(taken & (magnitude > 0)).view(-1)

    def take_largest(self, residuals: Sequence[Tensor], k: int) -> SparseVector | None:
        """Take the k largest of residuals, and leave zeros; None if one is not finite."""
        together = residuals[0] if len(residuals) == 1 else torch.cat([*residuals])
        there = TorchMemory.largest(self, together, k)
        values = together[there].cpu().numpy()
        # An element that is not finite counts as the largest, so it is taken, if any is.
        if not np.isfinite(values).all():
            return None
        together.index_fill_(0, there, 0)
        if len(residuals) > 1:
            foreach_copy_([*residuals], [*together.split([r.numel() for r in residuals])])
        return SparseVector(len(together), there.cpu().numpy().astype(np.uint32), values)

    def _placed(self, tensors: Sequence[Tensor], vector: SparseVector) -> memory.Placed:
        """Leave out tensors without entries; all entries are copied to the device at once."""
        parts = list(vector.parts([tensor.numel() for tensor in tensors]))
        if not len(vector):
            return []
        device, counts = tensors[0].device, [len(part) for part in parts]
        indices = np.concatenate([part.indices for part in parts]).astype(np.int64)
        there = torch.from_numpy(indices).to(device).split(counts)
        values = torch.from_numpy(vector.values).to(device).split(counts)
        return [row for row in zip(tensors, there, values, strict=True) if row[1].numel()]


def moved_units(units: Sequence[Unit], momentum: float) -> Sequence[Unit]:
    """Update velocities, where there are any, and return the units with these as gradients."""
    every = [each for unit in units for each in unit if each.velocity is not None]
    if not every:
        return units
    # A product and a sum, each rounded, as on the CPU: no fused multiply-add.
    velocities = [each.velocity for each in every if each.velocity is not None]
    foreach_mul_(velocities, momentum)
    foreach_add_(velocities, [each.gradient for each in every])
    return [
        [Tracked(t.residual, t.gradient if t.velocity is None else t.velocity) for t in unit]
        for unit in units
    ]


class CudaMemory(TorchMemory):
    """Memory of a GPU, with a stream of its own beside that of the backward pass.

    The calling thread, which is the exchange's own, waits for the device at the end of
    :meth:`after`, without the interpreter's lock.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    @cached_property
    def _selection(self) -> TorchMemory:
        return selection_on(self.device)

    def take(self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float) -> Taken:
        """Add gradients to residuals, take out those of largest magnitude, and leave zeros."""
        return self._selection.take(units, counts, momentum=momentum)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    @contextmanager
    def after(self, marks: Sequence[torch.cuda.Event]) -> Iterator[None]:
        """Run the block on the stream, after the events."""
        with torch.cuda.stream(self._stream):
            for event in marks:
                self._stream.wait_event(event)
            yield
            self._stream.synchronize()


def selection_on(device: torch.device) -> TorchMemory:
    """Return the selection for a GPU: Triton's kernels, or operations of torch, which are slower.

    Triton comes with torch for CUDA, but needs a C compiler when it is first used.
    """
    try:
        from syncline.train.sparse.triton_memory import TritonMemory

        found = TritonMemory(device)
        found.largest(torch.ones(2, device=device), 1)
    except Exception as error:  # from Triton, its compiler, or the C compiler that it needs
        logger.warning(
            "syncline: the largest gradients are selected by torch.topk, which is slower: Triton's "
            "kernels cannot be used here (%s: %s)",
            type(error).__name__,
            error,
        )
        return TorchMemory(device)
    return found


def memory_of(device: torch.device) -> Memory:
    """Return the memory for gradients on a device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def _largest_of_each(tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest magnitude of each tensor; NaN if it holds one, 0 if it is empty."""
    present = [number for number, tensor in enumerate(tensors) if tensor.numel()]
    found = [0.0] * len(tensors)
    if present:
        norms = foreach_norm([tensors[number] for number in present], math.inf)
        for number, norm in zip(present, torch.stack([*norms]).tolist(), strict=True):
            found[number] = norm
    return found
