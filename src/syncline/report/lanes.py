"""When a timeline's spans run, and what of the communication is exposed."""

from __future__ import annotations

from collections.abc import Iterable

from syncline.model.timeline import Span, Timeline

__all__ = ["busy_ns", "exposed_intervals", "union"]

Interval = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Interval]:
    """Return the disjoint intervals in which at least one of ``spans`` runs, in nanoseconds."""
    merged: list[Interval] = []
    for start, stop in sorted((s.start_ns, s.stop_ns) for s in spans):
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def busy_ns(intervals: Iterable[Interval]) -> int:
    """Return the nanoseconds that disjoint intervals take together."""
    return sum(stop - start for start, stop in intervals)


def exposed_intervals(timeline: Timeline) -> list[Interval]:
    """Return when a message is under way and nothing computes, in nanoseconds."""
    computing = union(s for s in timeline.spans if s.kind != "message")
    exposed: list[Interval] = []
    index = 0
    for start, stop in union(s for s in timeline.spans if s.kind == "message"):
        while index < len(computing) and computing[index][1] <= start:
            index += 1
        clock = start
        following = index
        while following < len(computing) and computing[following][0] < stop:
            if clock < computing[following][0]:
                exposed.append((clock, computing[following][0]))
            clock = max(clock, computing[following][1])
            following += 1
        if clock < stop:
            exposed.append((clock, stop))
    return exposed
