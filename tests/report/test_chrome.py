"""The trace has the form that Perfetto and chrome://tracing read."""

from __future__ import annotations

import itertools
import json
from typing import Any

from syncline.model.timeline import Span, Timeline
from syncline.report.bundle import Bundle
from syncline.report.chrome import to_chrome_trace


def _events(*timelines: Timeline) -> list[dict[str, Any]]:
    trace = json.loads(to_chrome_trace(timelines))
    return list(trace["traceEvents"])


def test_each_timeline_is_a_named_process_with_named_threads(bundle: Bundle) -> None:
    events = _events(*bundle.timelines())
    processes = {
        e["pid"]: e["args"]["name"]
        for e in events
        if e["name"] == "process_name" and e["ph"] == "M"
    }
    assert processes == {1: "predicted: merge, 7 messages", 2: "measured: merge, 7 messages"}
    threads = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert threads == [
        (1, "compute"),
        (1, "communication"),
        (2, "compute"),
        (2, "communication"),
    ]


def test_every_span_is_a_complete_event_in_microseconds(bundle: Bundle) -> None:
    timeline = bundle.timeline_predicted
    assert timeline is not None
    complete = [e for e in _events(timeline) if e["ph"] == "X"]
    assert len(complete) == len(timeline.spans)
    message = next(s for s in timeline.spans if s.kind == "message")
    event = next(e for e in complete if e["name"] == message.label)
    assert event["ts"] == message.start_ns / 1000
    assert event["dur"] == (message.stop_ns - message.start_ns) / 1000
    assert event["args"] == {"kind": "message", "bytes": message.size_bytes}
    assert event["cat"] == "message"


def test_overlapping_messages_go_to_threads_of_their_own() -> None:
    spans = tuple(
        Span(
            lane="communication",
            start_ns=start,
            stop_ns=start + 1500,
            label=str(start),
            kind="message",
            size_bytes=start,
        )
        for start in range(0, 5000, 700)
    )
    events = _events(Timeline(name="two", source="measured", iteration_ns=9000, spans=spans))
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_thread) == 3
    for spans_of_thread in by_thread.values():
        for before, after in itertools.pairwise(sorted(spans_of_thread)):
            assert before[1] <= after[0]
    assert events[2]["args"] == {"name": "communication"}


def test_no_timeline_is_an_empty_trace() -> None:
    assert _events() == []
