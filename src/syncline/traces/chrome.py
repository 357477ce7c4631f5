"""Timelines in the Chrome trace event format, which Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.model.timeline import Span, Timeline, rows
from syncline.traces.flows import Flow, flows

__all__ = ["to_chrome_trace"]

NS_PER_US = 1000


def to_chrome_trace(
    timelines: Iterable[Timeline],
    *,
    profile: Profile | None = None,
    plan: Plan | None = None,
) -> str:
    """Return the timelines as one trace: a process a timeline, a thread a row of spans.

    Spans of a lane that overlap go to further threads of that lane, because the format takes
    events of one thread for nested calls and Perfetto drops those that overlap in part. Where it is
    known when messages were ready, a counter shows how many are and have not been sent.

    Args:
        timelines: any number of them; each starts at time 0.
        profile: with ``plan``, adds arrows: from the operation that makes a gradient ready to its
            message, and from the message to what waits for it (:func:`~.flows.flows`).
        plan: see ``profile``; of timelines of other plans no message is matched.

    Returns:
        JSON text: an object with ``traceEvents``, times in microseconds with three decimals.
    """
    events: list[dict[str, Any]] = []
    arrows = 0
    for pid, timeline in enumerate(timelines, start=1):
        events += _process(timeline, pid)
        if profile is not None and plan is not None:
            found = flows(timeline, profile, plan)
            events += _arrows(found, timeline, pid, first_id=arrows)
            arrows += len(found)
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    return msgspec.json.encode(trace).decode() + "\n"


def _process(timeline: Timeline, pid: int) -> list[dict[str, Any]]:
    name = f"{timeline.source}: {timeline.name}"
    events = [
        _metadata("process_name", pid, 0, {"name": name}),
        _metadata("process_sort_index", pid, 0, {"sort_index": pid}),
    ]
    for tid, row in enumerate(rows(timeline), start=1):
        events.append(_metadata("thread_name", pid, tid, {"name": row.name}))
        events.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
        events += [_complete(span, pid, tid) for span in row.spans]
    return [*events, *_queue(timeline, pid)]


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {"kind": span.kind}
    if span.size_bytes is not None:
        args["bytes"] = span.size_bytes
    if span.ready_ns is not None:
        args["ready_us"] = span.ready_ns / NS_PER_US
        args["issued_us"] = span.start_ns / NS_PER_US
        args["finished_us"] = span.stop_ns / NS_PER_US
    event = {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": span.label,
        "cat": span.kind,
        "ts": span.start_ns / NS_PER_US,
        "dur": (span.stop_ns - span.start_ns) / NS_PER_US,
        "args": args,
    }
    if span.kind == "wait":
        # The name tells it from the operation that waits; chrome://tracing draws it in red.
        event |= {"name": f"wait: {span.label}", "cname": "terrible"}
    return event


def _queue(timeline: Timeline, pid: int) -> list[dict[str, Any]]:
    """Return a counter of the messages that are ready and have not been sent."""
    changes: dict[int, int] = {}
    for span in timeline.spans:
        if span.ready_ns is not None:
            changes[span.ready_ns] = changes.get(span.ready_ns, 0) + 1
            changes[span.start_ns] = changes.get(span.start_ns, 0) - 1
    queued, events = 0, []
    for at_ns, change in sorted(changes.items()):
        queued += change
        events.append(
            {
                "ph": "C",
                "pid": pid,
                "tid": 0,
                "name": "ready and not sent",
                "ts": at_ns / NS_PER_US,
                "args": {"messages": queued},
            }
        )
    return events


def _arrows(
    found: Iterable[Flow], timeline: Timeline, pid: int, *, first_id: int
) -> list[dict[str, Any]]:
    thread = {
        id(span): tid for tid, row in enumerate(rows(timeline), start=1) for span in row.spans
    }
    events: list[dict[str, Any]] = []

    def end(phase: str, span: Span, at_ns: int, number: int) -> dict[str, Any]:
        return {
            "ph": phase,
            "id": number,
            "pid": pid,
            "tid": thread[id(span)],
            "name": "gradient",
            "cat": "flow",
            "ts": at_ns / NS_PER_US,
        }

    for number, flow in enumerate(found, start=first_id):
        # An arrow is tied to the span that is open at its time: the last nanosecond still is.
        leaves_ns = max(flow.source.stop_ns - 1, flow.source.start_ns)
        events.append(end("s", flow.source, leaves_ns, number))
        events.append(end("f", flow.target, flow.target.start_ns, number) | {"bp": "e"})
    return events


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}
