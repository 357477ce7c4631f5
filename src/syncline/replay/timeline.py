"""One replayed iteration as a timeline, beside the predicted one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from syncline.model.timeline import COMMUNICATION, Span, SpanKind, Timeline

__all__ = ["Ran", "SentMessage", "measured_timeline"]


class Ran(NamedTuple):
    """What a lane of the emulated device did, in ns of the monotonic clock."""

    lane: str
    label: str
    kind: SpanKind
    start_ns: int
    stop_ns: int


class SentMessage(NamedTuple):
    """When a message went, in ns of the monotonic clock."""

    label: str
    size_bytes: int
    ready_ns: int
    """The last of its gradients was there."""
    issued_ns: int
    """It was handed to the backend."""
    finished_ns: int
    """It had arrived."""


def measured_timeline(
    name: str,
    begun_ns: int,
    ended_ns: int,
    ran: Sequence[Ran],
    messages: Iterable[SentMessage],
) -> Timeline:
    """Return the timeline of one iteration: what lay in it, clipped to it.

    Args:
        name: of the plan.
        begun_ns: when the iteration began, on the monotonic clock.
        ended_ns: when the next one did.
        ran: what the device did.
        messages: those of the iteration and of the one before, which may reach into it.
    """
    length_ns = max(ended_ns - begun_ns, 0)
    spans = [
        Span(lane=lane, start_ns=start, stop_ns=stop, label=label, kind=kind)
        for lane, label, kind, a, b in ran
        for start, stop in _inside(a - begun_ns, b - begun_ns, length_ns)
    ]
    spans += [
        Span(
            lane=COMMUNICATION,
            start_ns=start,
            stop_ns=stop,
            label=message.label,
            kind="message",
            size_bytes=message.size_bytes,
            ready_ns=min(max(message.ready_ns - begun_ns, 0), start),
        )
        for message in messages
        for start, stop in _inside(
            message.issued_ns - begun_ns, message.finished_ns - begun_ns, length_ns
        )
    ]
    return Timeline(name=name, source="measured", iteration_ns=length_ns, spans=tuple(spans))


def _inside(start_ns: int, stop_ns: int, length_ns: int) -> Iterator[tuple[int, int]]:
    """Yield the part of an interval that lies in an iteration, if any does."""
    start_ns, stop_ns = max(start_ns, 0), min(stop_ns, length_ns)
    if start_ns < stop_ns:
        yield start_ns, stop_ns
