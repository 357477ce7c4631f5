"""``Timeline``: what ran when, predicted or measured, and its rows in a picture."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from syncline.errors import UserError, quoted
from syncline.plan.document import Document, Value
from syncline.plan.profile import NOT_COMPUTED, Phase

SpanKind = Phase | Literal["message", "wait"]
"""What runs; ``wait`` is computation that waits for messages, or communication with other workers
other than gradient messages."""

COMPUTE = "compute"
COMMUNICATION = "communication"

NOT_COMPUTING: frozenset[SpanKind] = frozenset({"message", "wait"})
"""Kinds of spans in which no computation runs."""

Interval = tuple[int, int]  # (from, to) in nanoseconds


class Span(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that ran on one lane; a message starts when it is issued."""

    lane: str
    start_ns: int
    stop_ns: int
    label: str  # for a wait, what is waited for
    kind: SpanKind
    size_bytes: int | None = None  # bytes of the message; None for computation
    ready_ns: int | None = None
    """When the last gradient of the message was ready; None if not known."""


LATEST_NS = 1 << 62


class Timeline(Document, frozen=True, kw_only=True):
    """Spans on an integer-nanosecond clock that starts with the iteration.

    Raises:
        UserError: on construction, if times are negative or out of order, or a span other than a
            message has ``ready_ns``.
    """

    KIND: ClassVar[str] = "timeline"
    VERSION: ClassVar[int] = 1

    name: str
    source: Literal["predicted", "measured"]
    iteration_ns: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if self.iteration_ns < 0:
            raise UserError(f"timeline: iteration_ns is negative: {quoted(self.iteration_ns)}")
        latest_ns = max([self.iteration_ns, *(span.stop_ns for span in self.spans)])
        if latest_ns > LATEST_NS:
            raise UserError(
                f"timeline: times are at most {LATEST_NS} ns, found {quoted(latest_ns)} ns"
            )
        for index, span in enumerate(self.spans):
            wrong = None
            if not 0 <= span.start_ns <= span.stop_ns:
                wrong = (
                    f"runs from {span.start_ns} ns to {span.stop_ns} ns; a span starts at 0 or "
                    "later and does not stop before it starts"
                )
            elif span.ready_ns is not None and span.kind != "message":
                wrong = (
                    f"has ready_ns and is of the kind {quoted(span.kind)}; only messages have it"
                )
            elif span.ready_ns is not None and not 0 <= span.ready_ns <= span.start_ns:
                wrong = (
                    f"is ready at {span.ready_ns} ns and starts at {span.start_ns} ns; a message "
                    "is ready at 0 or later and not after it starts"
                )
            if wrong is not None:
                raise UserError(f"timeline: spans[{index}] {quoted(span.label)} {wrong}")

    def lanes(self) -> tuple[str, ...]:
        """Return the names of the lanes in the order in which they first appear."""
        return tuple(dict.fromkeys(span.lane for span in self.spans))

    @property
    def records_waits(self) -> bool:
        """Whether the timeline records waiting: as spans, or by when messages were ready."""
        return any(_is_stall(span) or span.ready_ns is not None for span in self.spans)

    def stall_ns(self) -> int:
        """Return how long the computation of any worker waited for messages."""
        return active_ns(union(filter(_is_stall, self.spans)))

    def order_stall_ns(self) -> int:
        """Return how long the link was idle only because messages go in a fixed order.

        That is the time in which nothing was in flight, the next message was not ready, and a later
        one was. Messages without ``ready_ns`` count as ready when they are issued.
        """
        messages = sorted(self._messages(), key=lambda span: (span.start_ns, span.stop_ns))
        ready_ns = [s.start_ns if s.ready_ns is None else s.ready_ns for s in messages]
        # For each message: the earliest time at which it or any later one is ready.
        later_ns = list(itertools.accumulate(reversed(ready_ns), min))[::-1]
        total_ns = free_ns = 0
        for message, own_ns, next_ns in zip(messages, ready_ns, later_ns[1:], strict=False):
            total_ns += max(min(message.start_ns, own_ns) - max(free_ns, next_ns), 0)
            free_ns = max(free_ns, message.stop_ns)
        return total_ns

    def link_share(self) -> float:
        """Return the share of the iteration in which at least one message was in flight."""
        active = active_ns(union(self._messages()))
        return active / self.iteration_ns if self.iteration_ns else 0.0

    def _messages(self) -> Iterator[Span]:
        return (span for span in self.spans if span.kind == "message")


def _is_stall(span: Span) -> bool:
    return span.kind == "wait" and span.lane not in NOT_COMPUTED


def union(spans: Iterable[Span]) -> list[Interval]:
    """Return the disjoint intervals in which at least one of ``spans`` runs, in nanoseconds."""
    return merged((s.start_ns, s.stop_ns) for s in spans)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint ones, in order and without empty ones."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if start == stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def active_ns(intervals: Iterable[Interval]) -> int:
    """Return the nanoseconds that disjoint intervals take together."""
    return sum(stop - start for start, stop in intervals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Spans of one lane that do not overlap, ordered by time."""

    lane: str
    index: int  # 0 for the lane's first row; more where spans of the lane run at the same time
    spans: tuple[Span, ...]

    @property
    def name(self) -> str:
        """The lane's name, numbered from its second row on."""
        return self.lane if self.index == 0 else f"{self.lane} {self.index + 1}"


def rows(timeline: Timeline) -> tuple[Row, ...]:
    """Return the rows of a timeline: computing first, communication next, then the other lanes."""
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


def exposed_intervals(timeline: Timeline) -> list[Interval]:
    """Return when a message is in flight and nothing computes, in nanoseconds."""
    return difference(
        union(s for s in timeline.spans if s.kind == "message"),
        union(s for s in timeline.spans if s.kind not in NOT_COMPUTING),
    )


def difference(intervals: Iterable[Interval], hidden: Sequence[Interval]) -> list[Interval]:
    """Return the parts of disjoint intervals outside of ``hidden``; both are in order."""
    exposed: list[Interval] = []
    index = 0
    for start, stop in intervals:
        clock = start
        while index < len(hidden) and hidden[index][0] < stop:
            if clock < hidden[index][0]:
                exposed.append((clock, hidden[index][0]))
            clock = max(clock, hidden[index][1])
            if clock >= stop:
                break  # this hidden interval may cover the next one too
            index += 1
        if clock < stop:
            exposed.append((clock, stop))
    return exposed
