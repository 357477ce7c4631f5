"""The trace has the form that Perfetto and chrome://tracing read, with arrows where known."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given

from syncline.files.traces.chrome import flows, to_chrome_trace
from syncline.plan.network import PRESETS
from syncline.plan.plan import Message, Plan
from syncline.plan.planners.merge import Merge
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Operation, Profile
from syncline.plan.simulator.predict import predict
from syncline.plan.timeline import COMMUNICATION, COMPUTE, Span, Timeline
from tests.files.traces.seeds import layered_profile
from tests.strategies import layer_profiles, many, timelines

NETWORK = PRESETS["10gbe-k80"]


def _profile() -> Profile:
    profile = layered_profile()
    update = Operation(name="update", phase="update", duration_s=1e-3)
    return msgspec.structs.replace(profile, operations=(*profile.operations, update))


def _timeline(profile: Profile) -> tuple[Timeline, Plan]:
    plan = Wfbp().plan(profile, NETWORK)
    return predict(profile, NETWORK, plan).timeline, plan


def _events(*timelines: Timeline, **nouns: Any) -> list[dict[str, Any]]:
    trace = json.loads(to_chrome_trace(timelines, **nouns))
    return list(trace["traceEvents"])


def test_each_timeline_is_a_named_process_with_named_threads() -> None:
    timeline, _ = _timeline(_profile())
    measured = msgspec.structs.replace(timeline, source="measured")
    events = _events(timeline, measured)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "predicted: wfbp", 2: "measured: wfbp"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == list(timeline.lanes())


def test_every_span_is_a_complete_event_in_microseconds() -> None:
    timeline, _ = _timeline(_profile())
    complete = [e for e in _events(timeline) if e["ph"] == "X"]
    assert len(complete) == len(timeline.spans)
    message = next(s for s in timeline.spans if s.kind == "message")
    assert message.ready_ns is not None
    event = next(e for e in complete if e["name"] == message.label and e["cat"] == "message")
    assert event["ts"] == message.start_ns / 1000
    assert event["dur"] == (message.stop_ns - message.start_ns) / 1000
    assert event["args"] == {
        "kind": "message",
        "bytes": message.size_bytes,
        "ready_us": message.ready_ns / 1000,
        "issued_us": message.start_ns / 1000,
        "finished_us": message.stop_ns / 1000,
    }
    # What is not known is not said.
    unknown = msgspec.structs.replace(message, ready_ns=None)
    without = msgspec.structs.replace(timeline, spans=(unknown,))
    (event,) = [e for e in _events(without) if e["ph"] in "XC"]
    assert event["args"] == {"kind": "message", "bytes": message.size_bytes}


def test_a_wait_is_not_taken_for_the_operation_that_waits() -> None:
    spans = (_span("fc", 0, 2000, "wait"), _span("fc", 2000, 3000))
    timeline = Timeline(name="t", source="measured", iteration_ns=3000, spans=spans)
    events = [e for e in _events(timeline) if e["ph"] == "X"]
    assert [(e["name"], e["cat"], e["args"]) for e in events] == [
        ("wait: fc", "wait", {"kind": "wait"}),
        ("fc", "forward", {"kind": "forward"}),
    ]
    assert [e.get("cname") for e in events] == ["terrible", None]


def test_a_counter_shows_what_is_ready_and_not_sent() -> None:
    spans = tuple(
        Span(
            lane=COMMUNICATION,
            start_ns=start,
            stop_ns=start + 1000,
            label=str(start),
            kind="message",
            size_bytes=1,
            ready_ns=ready,
        )
        for ready, start in ((0, 0), (500, 1000), (500, 2000), (4000, 4000))
    )
    timeline = Timeline(name="t", source="measured", iteration_ns=5000, spans=spans)
    events = _events(timeline, timeline)
    counted = [(e["ts"], e["args"]["messages"]) for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert counted == [(0.0, 0), (0.5, 2), (1.0, 1), (2.0, 0), (4.0, 0)]


@given(timelines())
@many
def test_the_counter_ends_with_nothing(timeline: Timeline) -> None:
    counted = [e["args"]["messages"] for e in _events(timeline) if e["ph"] == "C"]
    assert all(number >= 0 for number in counted)
    assert not counted or counted[-1] == 0


@given(timelines())
@many
def test_events_of_a_thread_never_overlap(timeline: Timeline) -> None:
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in _events(timeline):
        if event["ph"] == "X":
            by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, by_thread.values())) == len(timeline.spans)
    for spans in by_thread.values():
        for before, after in itertools.pairwise(sorted(spans)):
            assert before[1] <= after[0] + 1e-3


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
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 3
    assert events[2]["args"] == {"name": "communication"}


def test_no_timeline_is_an_empty_trace() -> None:
    assert _events() == []


# ------------------------------------------------------------------ arrows


def test_arrows_lead_to_messages_and_from_them() -> None:
    profile = _profile()
    timeline, plan = _timeline(profile)
    found = [(f.source.label, f.target.label) for f in flows(timeline, profile, plan)]
    assert found == [
        ("fc backward", "fc"),
        ("fc", "update"),
        ("conv backward", "conv"),
        ("conv", "update"),
    ]


def test_arrows_are_tied_to_the_spans() -> None:
    profile = _profile()
    timeline, plan = _timeline(profile)
    events = _events(timeline, timeline, profile=profile, plan=plan)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == len(ends) == 8
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] == end["pid"]
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        for point in (start, end):
            enclosing = [
                e
                for e in events
                if e["ph"] == "X"
                and (e["pid"], e["tid"]) == (point["pid"], point["tid"])
                and e["ts"] <= point["ts"] <= e["ts"] + e["dur"]
            ]
            assert enclosing


@given(layer_profiles(min_elements=1))
@many
def test_arrows_point_forward_in_time(profile: Profile) -> None:
    plan = Merge().plan(profile, NETWORK)
    timeline = predict(profile, NETWORK, plan).timeline
    found = flows(timeline, profile, plan)
    into = [flow for flow in found if flow.target.kind == "message"]
    assert len(into) == len(plan.messages)
    for flow in found:
        assert flow.source.stop_ns <= flow.target.start_ns


def _span(label: str, start: int, stop: int, kind: str = "forward") -> Span:
    lane = COMMUNICATION if kind == "message" else COMPUTE
    return msgspec.convert(
        {"lane": lane, "start_ns": start, "stop_ns": stop, "label": label, "kind": kind}, Span
    )


def test_arrows_lead_past_waits_to_what_waited() -> None:
    profile = layered_profile()
    plan = msgspec.structs.replace(Wfbp().plan(profile, NETWORK), wait="need")
    timeline = predict(profile, NETWORK, plan).timeline
    assert any(span.kind == "wait" for span in timeline.spans)
    for flow in flows(timeline, profile, plan):
        assert "wait" not in (flow.source.kind, flow.target.kind)


def test_where_operations_wait_by_need_arrows_lead_into_the_next_iteration() -> None:
    profile = layered_profile()
    plan = msgspec.structs.replace(Wfbp().plan(profile, NETWORK), wait="need")
    spans = []
    at = 0
    for _ in range(2):
        for operation in profile.operations:
            spans.append(_span(operation.name, at, at + 10, operation.phase))
            at += 10
            if operation.name in ("fc backward", "conv backward"):
                spans.append(_span(operation.name.split()[0], at, at + 15, "message"))
    timeline = Timeline(name="t", source="measured", iteration_ns=70, spans=tuple(spans))
    found = [
        (f.source.label, f.target.label, f.target.start_ns) for f in flows(timeline, profile, plan)
    ]
    # 7 operations of 10 ns; conv is the second of the second iteration, and the message comes late.
    assert ("fc backward", "fc", 50) in found
    assert ("fc", "fc", 100) in found
    assert ("conv backward", "conv", 70) in found
    assert not [f for f in found if f[:2] == ("conv", "conv") and f[2] < 85]


def test_an_all_gather_completes_a_reduce_scatter() -> None:
    profile = layered_profile()
    base = Wfbp().plan(profile, NETWORK)
    total = base.elements
    plan = msgspec.structs.replace(
        base,
        messages=(
            Message(start=0, stop=total, collective="reduce-scatter"),
            Message(start=0, stop=total, collective="all-gather"),
        ),
    )
    label = plan.label(range(2))
    spans = [_span(o.name, 10 * i, 10 * i + 10, o.phase) for i, o in enumerate(profile.operations)]
    spans += [_span(label, 70, 80, "message"), _span(label, 90, 95, "message")]
    spans += [_span("update", 100, 110, "update")]
    timeline = Timeline(name="t", source="measured", iteration_ns=110, spans=tuple(spans))
    found = [(f.source.start_ns, f.target.start_ns) for f in flows(timeline, profile, plan)]
    assert found == [(60, 70), (70, 90), (90, 100)]


@pytest.mark.parametrize("dropped", [0, 3])
def test_where_runs_cannot_be_told_apart_there_are_no_arrows(dropped: int) -> None:
    profile = _profile()
    names = ("same",) * len(profile.operations)
    operations = tuple(
        msgspec.structs.replace(o, name=n) for o, n in zip(profile.operations, names, strict=True)
    )
    profile = msgspec.structs.replace(profile, operations=operations)
    timeline, plan = _timeline(profile)
    spans = tuple(s for i, s in enumerate(timeline.spans) if i != dropped)
    less = msgspec.structs.replace(timeline, spans=spans)
    assert not [f for f in flows(less, profile, plan) if f.target.kind == "message"]
    assert [f for f in flows(timeline, profile, plan) if f.target.kind == "message"]
