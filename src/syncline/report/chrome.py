"""Timelines in the Chrome trace event format, which Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from syncline.model.timeline import Timeline
from syncline.report.lanes import rows

__all__ = ["to_chrome_trace"]

NS_PER_US = 1000


def to_chrome_trace(timelines: Iterable[Timeline]) -> str:
    """Return the timelines as one trace: a process a timeline, a thread a row of spans.

    Spans of a lane that overlap go to further threads of that lane, because the format takes
    events of one thread for nested calls and Perfetto drops those that overlap in part.

    Args:
        timelines: any number of them; each starts at time 0.

    Returns:
        JSON text: an object with ``traceEvents``, times in microseconds with three decimals.
    """
    events: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines, start=1):
        events += _process(timeline, pid)
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
        for span in row.spans:
            args: dict[str, Any] = {"kind": span.kind}
            if span.size_bytes is not None:
                args["bytes"] = span.size_bytes
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "name": span.label,
                    "cat": span.kind,
                    "ts": span.start_ns / NS_PER_US,
                    "dur": (span.stop_ns - span.start_ns) / NS_PER_US,
                    "args": args,
                }
            )
    return events


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}
