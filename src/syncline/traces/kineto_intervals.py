"""Unions of time intervals."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

__all__ = ["uncovered_ns", "union"]

Intervals = Sequence[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intervals that together cover what ``spans`` do, disjoint and in order.

    O(n log n).
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def uncovered_ns(spans: Intervals, start: int, stop: int, but: Intervals) -> int:
    """Return how much of ``[start, stop)`` lies in ``spans`` and not in ``but``, both unions."""
    total = 0
    for a, b in _within(spans, start, stop):
        total += b - a - sum(d - c for c, d in _within(but, a, b))
    return total


def _within(spans: Intervals, start: int, stop: int) -> list[tuple[int, int]]:
    index = max(bisect.bisect_right(spans, start, key=lambda s: s[0]) - 1, 0)
    found = []
    while index < len(spans) and spans[index][0] < stop:
        a, b = spans[index]
        if b > start:
            found.append((max(a, start), min(b, stop)))
        index += 1
    return found
