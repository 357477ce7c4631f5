"""Turns events of observed iterations into operations and gradients of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from syncline.plan.profile import ACCUMULATING, COMPUTING, Phase
from syncline.train.measure.clock import Clock
from syncline.train.measure.observer import AutogradGraph, Moment, ObservedEvent, ObservedIteration
from syncline.train.measure.statistics import median

LEAST_LEFT = 0.7
"""Least share that is left when the cost of recording is subtracted: less would be noise."""


class Segment(NamedTuple):
    """One operation: the part of an iteration between two events."""

    name: str
    phase: Phase
    duration_ns: int
    ready: tuple[str, ...] = ()  # parameters whose gradients are final when it ends
    node: int | None = None  # index of the autograd node that it runs
    first_event: int = -1  # index of the event that it begins with, for forward segments


class SegmentTrace(NamedTuple):
    """One iteration as segments in order; the graph if it was observed in detail."""

    segments: list[Segment]
    graph: AutogradGraph | None
    sequence_at: list[int]

    @property
    def ready_order(self) -> tuple[str, ...]:
        """Parameters in the order in which their gradients became final."""
        return tuple(name for segment in self.segments for name in segment.ready)


def read_iteration(iteration: ObservedIteration, clock: Clock) -> SegmentTrace:
    """Cut an iteration into segments.

    The forward pass is cut where submodules begin and end, and a segment is named after the
    innermost one. With gradient accumulation it begins with the first micro-batch, whose modules
    are the first to read parameters. The backward pass is cut where an operation begins or a
    gradient becomes final. Then come the exchange, the update and, as ``data``, everything until
    the next forward pass.
    """
    # In a static graph a gradient may be accumulated several times: the last one is final.
    final = {e.key: index for index, e in enumerate(iteration.events) if e.moment is Moment.READY}
    events = [
        event
        for index, event in enumerate(iteration.events)
        if event.moment is not Moment.READY or final[event.key] == index
    ]
    stamps = [event.stamp for event in events] + [iteration.end_stamp]
    times = [clock.between_ns(stamps[0], stamp) for stamp in stamps]
    output = _indices_of(events, Moment.OUTPUT, len(events) - 1)[0]
    segments = _forward(events, times, output)
    begin = _indices_of(events, Moment.WALKED, output)[0]
    last_ready = _indices_of(events, Moment.READY, begin)[-1]
    segments += _backward(events, times, begin, last_ready, iteration.graph)
    step = _indices_of(events, Moment.STEP, len(events))[0]
    stepped = _indices_of(events, Moment.STEPPED, step)[-1]
    segments.append(Segment("exchange", "finalize", times[step] - times[last_ready]))
    if stepped > step:
        segments.append(Segment("optimizer", "update", times[stepped] - times[step]))
    gathered = _indices_of(events, Moment.GATHERED, stepped)[-1]
    if gathered > stepped:
        segments.append(Segment("gathering", "finalize", times[gathered] - times[stepped]))
    segments.append(Segment("data loading", "data", times[-1] - times[gathered]))
    return SegmentTrace(segments, iteration.graph, iteration.sequence_at)


def _forward(events: Sequence[ObservedEvent], times: Sequence[int], output: int) -> list[Segment]:
    segments: list[Segment] = []
    active: list[str] = []
    for index, event in enumerate(events[:output]):
        if event.moment is Moment.ENTER:
            active.append(str(event.key))
        elif event.moment is Moment.EXIT and str(event.key) in active:
            while active.pop() != event.key:  # a module left by an exception never exits
                pass
        elif event.moment is Moment.ACCUMULATE:
            active = [ACCUMULATING]
        elif event.moment is Moment.RESUME:
            active = []
        name = active[-1] if active else "(between modules)"
        duration_ns = times[index + 1] - times[index]
        if segments and segments[-1].name == name:
            merged = segments[-1].duration_ns + duration_ns
            segments[-1] = segments[-1]._replace(duration_ns=merged)
        else:
            segments.append(Segment(name, "forward", duration_ns, first_event=index))
    return segments


def _backward(
    events: Sequence[ObservedEvent],
    times: Sequence[int],
    begin: int,
    last_ready: int,
    graph: AutogradGraph | None,
) -> list[Segment]:
    """Cut from the end of the forward pass to the last gradient."""
    segments: list[Segment] = []
    name, node = "loss", None
    phase: Phase = "forward"
    start_ns = times[begin]
    for index, event in enumerate(events[begin + 1 : last_ready + 1], start=begin + 1):
        duration_ns = times[index] - start_ns
        if event.moment is Moment.NODE:
            # The time between a gradient and the next operation belongs to the latter.
            if name:
                segments.append(Segment(name, phase, duration_ns, node=node))
                start_ns = times[index]
            assert graph is not None
            node = int(event.key)
            name, phase = graph.names[node], "backward"
        elif event.moment is Moment.READY:
            if name == "loss" and graph is None:  # loss and backward cannot be separated
                name, phase = "backward", "backward"
            label = name or f"gradient of {event.key}"
            segments.append(Segment(label, phase, duration_ns, (str(event.key),), node))
            start_ns = times[index]
            name, phase, node = "", "backward", None
    return segments


def median_trace(
    lean: Sequence[SegmentTrace], detailed: Sequence[SegmentTrace], quiet_ns: Sequence[int] = ()
) -> SegmentTrace:
    """Join traces of one model into one of medians.

    Only iterations with the most frequent structure count: an odd one (a logging step, another
    branch) has other operations. The lean iterations, at least one, give every duration. Noting
    each operation takes time, so those observed in detail only say how the time between two
    gradients is divided among the operations there. ``quiet_ns`` are durations of iterations in
    which nothing was noted: the cost of noting is taken off the lean passes.
    """
    lean_trace = _without_noting(_median_of(lean), quiet_ns)
    if not detailed:
        return lean_trace
    detailed_trace = _median_of(detailed)
    if detailed_trace.ready_order != lean_trace.ready_order:
        return lean_trace
    segments: list[Segment] = []
    groups = zip(_groups(lean_trace), _groups(detailed_trace), strict=True)
    for lean_group, detailed_group in groups:
        if any(segment.phase in ("finalize", "update", "data") for segment in lean_group):
            segments += lean_group
            continue
        forward = [s for s in lean_group if s.first_event >= 0]
        observed = [s for s in detailed_group if s.first_event >= 0]
        rest = [s for s in detailed_group if s.first_event < 0]
        if [s.name for s in forward] != [s.name for s in observed]:
            return lean_trace  # the graph is of iterations of another structure
        segments += [
            d._replace(duration_ns=s.duration_ns) for s, d in zip(forward, observed, strict=True)
        ]
        total_ns = sum(s.duration_ns for s in lean_group if s.first_event < 0)
        segments += _scaled(rest, total_ns)
    return SegmentTrace(segments, detailed_trace.graph, detailed_trace.sequence_at)


def _median_of(traces: Sequence[SegmentTrace]) -> SegmentTrace:
    signatures = [tuple((s.name, s.ready) for s in trace.segments) for trace in traces]
    common, _ = Counter(signatures).most_common(1)[0]
    same = [t for t, signature in zip(traces, signatures, strict=True) if signature == common]
    segments = [
        first._replace(duration_ns=round(median([t.segments[i].duration_ns for t in same])))
        for i, first in enumerate(same[-1].segments)
    ]
    # A delay is rare in each operation but not in their sum, so the sum of the medians is less than
    # the median of the sums. An iteration takes the latter, so the operations are stretched to it.
    whole_ns = median([_computing_ns(trace.segments) for trace in same])
    return same[-1]._replace(segments=_computing_in(segments, whole_ns))


def _without_noting(trace: SegmentTrace, quiet_ns: Sequence[int]) -> SegmentTrace:
    if not quiet_ns:
        return trace
    noting_ns = sum(segment.duration_ns for segment in trace.segments) - median(quiet_ns)
    computing_ns = _computing_ns(trace.segments)
    left_ns = min(max(computing_ns - noting_ns, computing_ns * LEAST_LEFT), computing_ns)
    return trace._replace(segments=_computing_in(trace.segments, left_ns))


def _computing_in(segments: Sequence[Segment], total_ns: float) -> list[Segment]:
    """Stretch forward and backward passes so that together they take ``total_ns``."""
    found_ns = _computing_ns(segments)
    factor = total_ns / found_ns if found_ns else 1.0
    return [
        s._replace(duration_ns=round(s.duration_ns * factor)) if s.phase in COMPUTING else s
        for s in segments
    ]


def _computing_ns(segments: Sequence[Segment]) -> int:
    return sum(segment.duration_ns for segment in segments if segment.phase in COMPUTING)


def _groups(trace: SegmentTrace) -> list[list[Segment]]:
    """Split after every segment that makes a gradient final."""
    groups: list[list[Segment]] = [[]]
    for segment in trace.segments:
        groups[-1].append(segment)
        if segment.ready:
            groups.append([])
    return groups


def _scaled(segments: Sequence[Segment], total_ns: int) -> list[Segment]:
    """Stretch the segments so that together they take ``total_ns``."""
    found_ns = sum(segment.duration_ns for segment in segments)
    factor = total_ns / found_ns if found_ns else 0.0
    scaled = [s._replace(duration_ns=round(s.duration_ns * factor)) for s in segments]
    if scaled:
        left_ns = total_ns - sum(s.duration_ns for s in scaled)
        scaled[-1] = scaled[-1]._replace(duration_ns=max(scaled[-1].duration_ns + left_ns, 0))
    return scaled


def first_forward_segment(trace: SegmentTrace) -> Mapping[str, int]:
    """Return, for each submodule that ran, the first segment in which it was innermost."""
    forward = [(s.name, i) for i, s in enumerate(trace.segments) if s.first_event >= 0]
    return dict(reversed(forward))  # of segments with one name, the first one stays


def _indices_of(events: Sequence[ObservedEvent], moment: Moment, default: int) -> list[int]:
    """Return the indices of a kind of events; ``[default]`` if there are none."""
    return [i for i, e in enumerate(events) if e.moment is moment] or [default]
