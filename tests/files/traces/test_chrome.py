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
change = msgspec.structs.replace
LAYERS = layered_profile()
UPDATE = Operation(name="update", phase="update", duration_s=1e-3)
PROFILE = change(LAYERS, operations=(*LAYERS.operations, UPDATE))
PLAN = Wfbp().plan(PROFILE, NETWORK)
BY_NEED = change(Wfbp().plan(LAYERS, NETWORK), wait="need")
TIMELINE = predict(PROFILE, NETWORK, PLAN).timeline


def events_of(*timelines: Timeline, **nouns: Any) -> list[dict[str, Any]]:
    return list(json.loads(to_chrome_trace(timelines, **nouns))["traceEvents"])


def span(label: str, start: int, stop: int, kind: str = "forward", **more: int) -> Span:
    lane = COMMUNICATION if kind == "message" else COMPUTE
    return Span(lane=lane, start_ns=start, stop_ns=stop, label=label, kind=kind, **more)


def measured(*spans: Span) -> Timeline:
    stop = max(span.stop_ns for span in spans)
    return Timeline(name="t", source="measured", iteration_ns=stop, spans=spans)


def test_each_timeline_is_a_named_process_with_named_threads() -> None:
    events = events_of(TIMELINE, change(TIMELINE, source="measured"))
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "predicted: wfbp", 2: "measured: wfbp"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == list(TIMELINE.lanes())


def test_every_span_is_a_complete_event_in_microseconds() -> None:
    complete = [e for e in events_of(TIMELINE) if e["ph"] == "X"]
    assert len(complete) == len(TIMELINE.spans)
    message = next(s for s in TIMELINE.spans if s.kind == "message")
    event = next(e for e in complete if e["name"] == message.label and e["cat"] == "message")
    assert event["ts"] == message.start_ns / 1000
    assert event["dur"] == (message.stop_ns - message.start_ns) / 1000
    known = {"kind": "message", "bytes": message.size_bytes}
    assert event["args"] == known | {
        "ready_us": message.ready_ns / 1000,
        "issued_us": message.start_ns / 1000,
        "finished_us": message.stop_ns / 1000,
    }
    # What is not known is not said.
    unknown = measured(change(message, ready_ns=None))
    (event,) = [e for e in events_of(unknown) if e["ph"] in "XC"]
    assert event["args"] == known


def test_a_wait_is_not_taken_for_the_operation_that_waits() -> None:
    events = events_of(measured(span("fc", 0, 2000, "wait"), span("fc", 2000, 3000)))
    found = [(e["name"], e["cat"], e["args"], e.get("cname")) for e in events if e["ph"] == "X"]
    assert found == [
        ("wait: fc", "wait", {"kind": "wait"}, "terrible"),
        ("fc", "forward", {"kind": "forward"}, None),
    ]


def test_a_counter_shows_what_is_ready_and_not_sent() -> None:
    times = ((0, 0), (500, 1000), (500, 2000), (4000, 4000))
    timeline = measured(
        *(span("m", at, at + 1000, "message", size_bytes=1, ready_ns=ready) for ready, at in times)
    )
    events = events_of(timeline, timeline)
    counted = [(e["ts"], e["args"]["messages"]) for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert counted == [(0.0, 0), (0.5, 2), (1.0, 1), (2.0, 0), (4.0, 0)]


@given(timelines())
@many
def test_any_timeline_is_counted_and_has_threads_without_overlap(timeline: Timeline) -> None:
    events = events_of(timeline)
    counted = [e["args"]["messages"] for e in events if e["ph"] == "C"]
    assert all(number >= 0 for number in counted)
    assert counted[-1:] in ([], [0])
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, by_thread.values())) == len(timeline.spans)
    for spans in by_thread.values():
        for before, after in itertools.pairwise(sorted(spans)):
            assert before[1] <= after[0] + 1e-3


def test_overlapping_messages_go_to_threads_of_their_own() -> None:
    spans = (span("m", at, at + 1500, "message", size_bytes=at) for at in range(0, 5000, 700))
    events = events_of(measured(*spans))
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 3
    assert events[2]["args"] == {"name": "communication"}


def test_no_timeline_is_an_empty_trace() -> None:
    assert events_of() == []


def arrows(timeline: Timeline, profile: Profile, plan: Plan) -> list[tuple[str, str, int]]:
    """Return the labels that arrows lead from and to, and when they end."""
    found = flows(timeline, profile, plan)
    return [(f.source.label, f.target.label, f.target.start_ns) for f in found]


def test_arrows_lead_to_messages_and_from_them() -> None:
    found = [arrow[:2] for arrow in arrows(TIMELINE, PROFILE, PLAN)]
    to_fc, to_conv = ("fc backward", "fc"), ("conv backward", "conv")
    assert found == [to_fc, ("fc", "update"), to_conv, ("conv", "update")]


def test_arrows_are_tied_to_the_spans() -> None:
    events = events_of(TIMELINE, TIMELINE, profile=PROFILE, plan=PLAN)
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert len(starts) == len(ends) == 8
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] == end["pid"]
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        for point in (start, end):
            assert any(
                e["ph"] == "X"
                and (e["pid"], e["tid"]) == (point["pid"], point["tid"])
                and e["ts"] <= point["ts"] <= e["ts"] + e["dur"]
                for e in events
            )


@given(layer_profiles(min_elements=1))
@many
def test_arrows_point_forward_in_time(profile: Profile) -> None:
    plan = Merge().plan(profile, NETWORK)
    found = flows(predict(profile, NETWORK, plan).timeline, profile, plan)
    assert sum(flow.target.kind == "message" for flow in found) == len(plan.messages)
    assert all(flow.source.stop_ns <= flow.target.start_ns for flow in found)


def test_arrows_lead_past_waits_to_what_waited() -> None:
    timeline = predict(LAYERS, NETWORK, BY_NEED).timeline
    assert any(span.kind == "wait" for span in timeline.spans)
    found = flows(timeline, LAYERS, BY_NEED)
    assert not [f for f in found if "wait" in (f.source.kind, f.target.kind)]


def test_where_operations_wait_by_need_arrows_lead_into_the_next_iteration() -> None:
    spans = []
    for index, operation in enumerate(LAYERS.operations * 2):
        at = 10 * index
        spans.append(span(operation.name, at, at + 10, operation.phase))
        if operation.name in ("fc backward", "conv backward"):
            spans.append(span(operation.name.split()[0], at + 10, at + 25, "message"))
    timeline = change(measured(*spans), iteration_ns=70)
    found = arrows(timeline, LAYERS, BY_NEED)
    # 7 operations of 10 ns; conv is the second of the second iteration, and the message comes late.
    assert {("fc backward", "fc", 50), ("fc", "fc", 100), ("conv backward", "conv", 70)} <= {*found}
    assert not [f for f in found if f[:2] == ("conv", "conv") and f[2] < 85]


def test_an_all_gather_completes_a_reduce_scatter() -> None:
    base = Wfbp().plan(LAYERS, NETWORK)
    messages = tuple(
        Message(start=0, stop=base.elements, collective=collective)
        for collective in ("reduce-scatter", "all-gather")
    )
    plan = change(base, messages=messages)
    label = plan.label(range(2))
    spans = [span(o.name, 10 * i, 10 * i + 10, o.phase) for i, o in enumerate(LAYERS.operations)]
    spans += [span(label, 70, 80, "message"), span(label, 90, 95, "message")]
    found = flows(measured(*spans, span("update", 100, 110, "update")), LAYERS, plan)
    times = [(f.source.start_ns, f.target.start_ns) for f in found]
    assert times == [(60, 70), (70, 90), (90, 100)]


@pytest.mark.parametrize("dropped", [0, 3])
def test_where_runs_cannot_be_told_apart_there_are_no_arrows(dropped: int) -> None:
    same = tuple(change(o, name="same") for o in PROFILE.operations)
    profile = change(PROFILE, operations=same)
    timeline = predict(profile, NETWORK, PLAN).timeline
    spans = tuple(s for i, s in enumerate(timeline.spans) if i != dropped)
    less = change(timeline, spans=spans)
    assert not [f for f in flows(less, profile, PLAN) if f.target.kind == "message"]
    assert [f for f in flows(timeline, profile, PLAN) if f.target.kind == "message"]
