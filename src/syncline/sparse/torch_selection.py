"""The k elements of largest magnitude by operations of torch, for whatever device they lie on."""

from __future__ import annotations

import math

import torch

__all__ = ["INFINITE", "largest", "magnitudes"]

INFINITE = 0x7F800000
"""Magnitude of an infinity; those above are NaN."""
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


def largest(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest magnitudes that are not zero, ascending.

    A threshold is guessed from a sample, a little low; what is above it is compacted, and the k
    largest of that are the result. So ``torch.topk`` sees some thousands of candidates instead of
    everything. If the guess was too high, everything that is not zero is a candidate: the result is
    exact whatever the guess. The host waits for the device once, for the number of candidates, and
    again for that of the result.

    Args:
        magnitude: of shape (elements,), int32, none below 0.
        k: how many; more than there are elements means all.

    Returns:
        int64, of shape (at most k,). Of equal magnitudes the lower index is taken.
    """
    k = min(k, magnitude.numel())
    if k == 0:
        return magnitude.new_empty(0, dtype=torch.int64)
    guess = _guessed(magnitude, k)
    candidates = torch.nonzero(magnitude > (0 if guess is None else guess)).view(-1)
    if guess is not None and len(candidates) < k:
        candidates = torch.nonzero(magnitude).view(-1)
    if len(candidates) <= k:
        return candidates
    near = magnitude[candidates]
    cut = torch.topk(near, k, sorted=False).values.amin()
    above, ties = near > cut, near == cut
    # Which of several equal ones topk returns is left open; here they count in their order.
    return candidates[above | (ties & (ties.cumsum(0) <= k - above.sum()))]


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
