"""``TorchMemory``: operations on residuals on any device, by torch; ``CudaMemory``: on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from syncline.sparse.memory import HostMemory, Memory, Unit, require_selectable
from syncline.sparse.vector import SparseVector
from syncline.torch_private import foreach_add_, foreach_copy_, foreach_mul_, foreach_norm


class TorchMemory(Memory):
    """Memory of any device, by operations of torch on the current stream.

    Work on several tensors is one call, since launches would take longer than the work; so is
    every read from the device.
    """

    def first_not_finite(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the number of the first tensor that holds an infinity or NaN."""
        norms = _largest_of_each(tensors)
        return next((n for n, norm in enumerate(norms) if not math.isfinite(norm)), None)

    def are_zero(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Say of each tensor whether it has elements and all are zeros."""
        norms = _largest_of_each(tensors)
        return [t.numel() > 0 and norm == 0 for t, norm in zip(tensors, norms, strict=True)]

    def take(
        self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float
    ) -> SparseVector | int:
        """Add gradients to residuals, take out those of largest magnitude, and leave zeros."""
        lengths = [sum(each.residual.numel() for each in unit) for unit in units]
        require_selectable(sum(lengths))
        every = [each for unit in units for each in unit]
        if not every:
            return SparseVector.empty(0)
        residuals = [each.residual for each in every]
        velocities = [each.velocity for each in every if each.velocity is not None]
        added = [each.gradient for each in every]
        if velocities:
            # A product and a sum, each rounded, as on the CPU: no fused multiply-add.
            foreach_mul_(velocities, momentum)
            foreach_add_(velocities, added)
            added = velocities
        foreach_add_(residuals, added)
        together = residuals[0] if len(residuals) == 1 else torch.cat(residuals)
        magnitude = magnitudes(together)
        there = largest(magnitude, lengths, counts)
        values = together[there].cpu().numpy()
        indices = there.cpu().numpy().astype(np.uint32)
        # An element that is not finite is the largest, so it is among those taken, if any are.
        odd = indices[~np.isfinite(values)]
        if len(odd):
            return int(np.searchsorted(np.cumsum(lengths), odd[0], side="right"))
        together.index_fill_(0, there, 0)
        if len(residuals) > 1:
            foreach_copy_(residuals, [*together.split([r.numel() for r in residuals])])
        return SparseVector(sum(lengths), indices, values)

    def _placed(
        self, tensors: Sequence[Tensor], vector: SparseVector
    ) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """Place only what has entries, which all travel to the device at once."""
        parts = list(vector.parts([tensor.numel() for tensor in tensors]))
        if not len(vector):
            return []
        device, counts = tensors[0].device, [len(part) for part in parts]
        indices = np.concatenate([part.indices for part in parts]).astype(np.int64)
        there = torch.from_numpy(indices).to(device).split(counts)
        values = torch.from_numpy(vector.values).to(device).split(counts)
        return [row for row in zip(tensors, there, values, strict=True) if row[1].numel()]


class CudaMemory(TorchMemory):
    """Memory of a GPU, with a stream of its own beside that of the backward pass.

    The calling thread waits for the device at the end, so later work needs no further wait. It is
    a thread of the exchange alone, and releases the interpreter's lock while it waits.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def after(self, marks: Sequence[torch.cuda.Event]) -> Iterator[None]:
        """Run the block on the stream, after the events."""
        with torch.cuda.stream(self._stream):
            for event in marks:
                self._stream.wait_event(event)
            yield
            self._stream.synchronize()

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future that makes the waiting thread's stream wait for its values."""
        return torch.futures.Future(devices=[self.device])


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


MAGNITUDE_BITS = 0x7FFFFFFF
LINE_ELEMENTS = 16
"""Elements of a sample that lie together."""
LINES = (4093, 1021, 251)
"""How many lines are sampled, the first for which there is a stretch of :data:`LONG_STRETCH` each.
Primes: gradients have rows of round lengths, with which round distances would fall in step, so that
a sample would be of a few columns."""
LONG_STRETCH = 1024
SAMPLED_FROM = 1 << 15
"""Elements; fewer are not worth a sample."""


def magnitudes(values: Tensor) -> Tensor:
    """Return the magnitudes of float32 as int32: in their order, then infinity, then NaN."""
    return values.view(torch.int32) & MAGNITUDE_BITS


def largest(magnitude: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return the indices of the largest magnitudes of each part that are not zero, ascending.

    A threshold for each part is guessed from a sample, a little low; what is above it is compacted,
    and the k largest of that are found, for all parts at once by sorting. So some thousands of
    candidates are compared instead of everything. Where a guess was too high, everything of that
    part that is not zero is a candidate: the result is exact whatever the guesses. The host waits
    for the device a few times, however many parts there are.

    Args:
        magnitude: of shape (elements,), int32, none below 0: the concatenation of the parts.
        lengths: of the parts, in elements.
        counts: k, how many of each part; more than it has elements means all.

    Returns:
        int64, of shape (at most the sum of the counts,). Of equal magnitudes the lower index is
        taken.
    """
    device = magnitude.device
    guessed = map(_guessed, magnitude.split([*lengths]), counts)
    guesses = {n: guess for n, guess in enumerate(guessed) if guess is not None}
    while True:
        candidates = torch.nonzero(magnitude > _expanded(guesses, lengths, device)).view(-1)
        parts, found = _by_part(candidates, lengths)
        lacking = [n for n in guesses if found[n] < counts[n]]
        if not lacking:
            break
        for part in lacking:
            del guesses[part]
    if all(n <= k for n, k in zip(found, counts, strict=True)):
        return candidates
    if parts is None:
        return candidates[_are_largest(magnitude[candidates], counts[0])]
    wanted = torch.tensor(counts, device=device)
    # By part, then from the largest on; the sort is stable, so of equal ones by index.
    order = (parts * (MAGNITUDE_BITS + 1) + (MAGNITUDE_BITS - magnitude[candidates])).argsort(
        stable=True
    )
    sizes = torch.tensor(found, device=device)
    firsts = sizes.cumsum(0) - sizes
    ordered = parts[order]
    ranks = torch.arange(len(order), device=device) - firsts[ordered]
    return candidates[order[ranks < wanted[ordered]].sort().values]


def _by_part(candidates: Tensor, lengths: Sequence[int]) -> tuple[Tensor | None, list[int]]:
    """Return which part each candidate is of, None if there is one, and how many each part has."""
    if len(lengths) == 1:
        return None, [len(candidates)]
    ends = torch.tensor(lengths, device=candidates.device).cumsum(0)
    parts = torch.searchsorted(ends, candidates, right=True)
    return parts, torch.bincount(parts, minlength=len(lengths)).tolist()


def _are_largest(magnitude: Tensor, k: int) -> Tensor:
    """Say of each magnitude whether it is one of the k largest, of equal ones the first."""
    if k == 0:
        return torch.zeros_like(magnitude, dtype=torch.bool)
    least = torch.topk(magnitude, k, sorted=False).values.amin()
    above, equal = magnitude > least, magnitude == least
    return above | (equal & (equal.cumsum(0) <= k - above.sum()))


def _expanded(guesses: dict[int, Tensor], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the threshold of every element, or one for all."""
    zero = torch.zeros((), dtype=torch.int32, device=device)
    thresholds = torch.stack([guesses.get(n, zero) for n in range(len(lengths))])
    if len(lengths) == 1:
        return thresholds
    repeats = torch.tensor(lengths, device=device)
    return thresholds.repeat_interleave(repeats, output_size=sum(lengths))


def _guessed(magnitude: Tensor, k: int) -> Tensor | None:
    """Return a magnitude, of shape (), that somewhat more than k exceed, from a sample, or None."""
    elements = magnitude.numel()
    if elements < SAMPLED_FROM:
        return None
    lines = next((n for n in LINES if elements // n >= LONG_STRETCH), LINES[-1])
    stretch = elements // lines
    sample = magnitude[: lines * stretch].view(lines, stretch)[:, :LINE_ELEMENTS].reshape(-1)
    expected = k / elements * sample.numel()
    # Lines are correlated, so their deviation is larger than that of independent samples.
    rank = math.ceil(1.2 * expected + 6.0 * math.sqrt(expected) + 4.0)
    if rank >= sample.numel():
        return None
    return (torch.topk(sample, rank, sorted=False).values.amin() - 1).clamp_(min=0)
