"""A timeline in rows: the spans of a lane that run at the same time lie in different ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from syncline.model.timeline import COMMUNICATION, COMPUTE, Span, Timeline

__all__ = ["Row", "rows"]


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
    busy: list[tuple[int, int]] = []  # (until when, row)
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
