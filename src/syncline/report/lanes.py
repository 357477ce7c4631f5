"""How a timeline is laid out: rows without overlaps, and what of the communication is exposed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from syncline.model.timeline import COMMUNICATION, COMPUTE, Span, Timeline

__all__ = ["Row", "busy_ns", "exposed_intervals", "rows", "union"]

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Spans of one lane that do not overlap, in order of time."""

    lane: str
    index: int
    """0 for the lane's first row; more where spans of the lane run at the same time."""
    spans: tuple[Span, ...]

    @property
    def name(self) -> str:
        """Name of the row: that of the lane, numbered from its second row on."""
        return self.lane if self.index == 0 else f"{self.lane} {self.index + 1}"


def rows(timeline: Timeline) -> tuple[Row, ...]:
    """Return the rows of a timeline: computing first, communication next, then the other lanes.

    Each span goes to the first row of its lane that is free when it starts, so that a lane has as
    many rows as it ever has spans at once. O(n log n) for n spans.
    """
    lanes = sorted(timeline.lanes(), key=lambda lane: (lane != COMPUTE, lane != COMMUNICATION))
    by_lane: dict[str, list[Span]] = {lane: [] for lane in lanes}
    for span in timeline.spans:
        by_lane[span.lane].append(span)
    return tuple(
        Row(lane=lane, index=index, spans=tuple(spans))
        for lane in lanes
        for index, spans in enumerate(_pack(by_lane[lane]))
    )


def _pack(spans: Iterable[Span]) -> list[list[Span]]:
    packed: list[list[Span]] = []
    free: list[int] = []  # rows that are free, lowest first
    busy: list[Interval] = []  # (until when, row)
    for span in sorted(spans, key=lambda s: (s.start_ns, s.stop_ns)):
        while busy and busy[0][0] <= span.start_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row = len(packed)
            packed.append([])
        packed[row].append(span)
        heapq.heappush(busy, (span.stop_ns, row))
    return packed


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
