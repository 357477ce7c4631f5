"""The k elements of largest magnitude by operations of torch, for whatever device they lie on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["largest", "magnitudes"]

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


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of float32 as int32: in their order, then infinity, then NaN."""
    return values.view(torch.int32) & MAGNITUDE_BITS


def largest(magnitude: torch.Tensor, lengths: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Return the indices of the largest magnitudes of each part that are not zero, ascending.

    A threshold for each part is guessed from a sample, a little low; what is above it is compacted,
    and the k largest of that are found by sorting, for all parts at once. So some thousands of
    candidates are sorted instead of everything. Where a guess was too high, everything of that part
    that is not zero is a candidate: the result is exact whatever the guesses. The host waits for
    the device a few times, however many parts there are.

    Args:
        magnitude: of shape (elements,), int32, none below 0: the parts one after the other.
        lengths: of the parts, in elements.
        counts: k, how many of each part; more than it has elements means all.

    Returns:
        int64, of shape (at most the sum of the counts,). Of equal magnitudes the lower index is
        taken.
    """
    device = magnitude.device
    guesses = _guesses(magnitude, lengths, counts)
    ends = torch.tensor(lengths, device=device).cumsum(0)
    while True:
        candidates = torch.nonzero(magnitude > _expanded(guesses, lengths, device)).view(-1)
        parts = torch.searchsorted(ends, candidates, right=True)
        found = torch.bincount(parts, minlength=len(lengths)).tolist()
        lacking = [n for n in guesses if found[n] < counts[n]]
        if not lacking:
            break
        for part in lacking:
            del guesses[part]
    wanted = torch.tensor(counts, device=device)
    if all(n <= k for n, k in zip(found, counts, strict=True)):
        return candidates
    # By part, then from the largest on; the sort is stable, so of equal ones by index.
    order = (parts * (MAGNITUDE_BITS + 1) + (MAGNITUDE_BITS - magnitude[candidates])).argsort(
        stable=True
    )
    sizes = torch.tensor(found, device=device)
    firsts = sizes.cumsum(0) - sizes
    ordered = parts[order]
    ranks = torch.arange(len(order), device=device) - firsts[ordered]
    return candidates[order[ranks < wanted[ordered]].sort().values]


def _expanded(
    guesses: dict[int, torch.Tensor], lengths: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return the threshold of every element, or the one of all."""
    thresholds = torch.zeros(len(lengths), dtype=torch.int32, device=device)
    if guesses:
        thresholds[torch.tensor([*guesses], device=device)] = torch.stack([*guesses.values()])
    if len(lengths) == 1:
        return thresholds
    repeats = torch.tensor(lengths, device=device)
    return thresholds.repeat_interleave(repeats, output_size=sum(lengths))


def _guesses(
    magnitude: torch.Tensor, lengths: Sequence[int], counts: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Return guessed thresholds, each of shape (), of the parts that are worth it, by number."""
    found = {}
    for number, (part, k) in enumerate(zip(magnitude.split([*lengths]), counts, strict=True)):
        guess = _guessed(part, k)
        if guess is not None:
            found[number] = guess
    return found


def _guessed(magnitude: torch.Tensor, k: int) -> torch.Tensor | None:
    """Return a magnitude that somewhat more than k exceed, as far as a sample can tell, or None."""
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
