"""Events, messages and waits to one period of the steady state, with a clock set by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.timeline import COMMUNICATION, COMPUTE, Timeline, active_ns, union
from syncline.train.engine.recording import (
    BucketStamps,
    EngineTimes,
    MessageTimes,
    WaitTimes,
    timeline_of,
)
from syncline.train.measure.clock import CpuClock, CudaClock
from syncline.train.measure.observer import Moment, ObservedEvent, ObservedIteration

M = Moment
START = 1000  # stamp of every iteration's beginning: times below are relative to it


def stamped(*events: tuple[Moment, str | int, int]) -> list[ObservedEvent]:
    return [ObservedEvent(moment, key, START + at) for moment, key, at in events]


EVENTS = stamped(
    (M.FORWARD, "", 0),
    (M.ENTER, "a", 30),  # its hook waited from 5 to 28
    (M.EXIT, "a", 50),
    (M.ENTER, "b", 50),
    (M.EXIT, "b", 80),
    (M.OUTPUT, "", 80),
    (M.WALKED, "", 90),
    (M.READY, "b", 120),
    (M.READY, "a", 170),
)
DEFERRED = ObservedIteration(EVENTS, START + 190, None, [])
"""The forward pass to 80, ten of walking the graph, the backward pass to 170, then the loop."""
STEPPED = DEFERRED._replace(events=EVENTS + stamped((M.STEP, "", 176), (M.STEPPED, "", 180)))
PERIOD = 180  # without the walk
TO_B, TO_A = Message(start=0, stop=100), Message(start=100, stop=300)
TENSORS = Tensor(name="b", elements=100), Tensor(name="a", elements=200)
PLAN = Plan(planner="p", model="m", workers=2, tensors=TENSORS, messages=(TO_B, TO_A), wait="need")
UPDATE = replace(PLAN, wait="update")


def message(number: int, ready: int, issued: int, finished: int) -> MessageTimes:
    return MessageTimes(number, START + ready, START + issued, START + finished)


def wait(label: str, began: int, arrived: int, updated: int) -> WaitTimes:
    return WaitTimes(label, START + began, START + arrived, START + updated)


BEFORE = [message(0, -70, -65, -30), message(1, -20, -20, 25)]
OWN = message(0, 120, 125, 160)
LAST = message(1, 170, 171, 175)
WAIT = wait("a", 5, 25, 28)


def shown(
    messages: Sequence[MessageTimes] = (*BEFORE, OWN),
    waits: Sequence[WaitTimes] = (WAIT,),
    *,
    of: ObservedIteration = DEFERRED,
    plan: Plan = PLAN,
) -> Timeline:
    """Return the timeline of an iteration that the engine recorded this of."""
    return timeline_of(of, EngineTimes([*messages], [*waits]), plan, CpuClock())


def computing(timeline: Timeline) -> list[tuple[str, int, int, str]]:
    return [(s.kind, s.start_ns, s.stop_ns, s.label) for s in timeline.spans if s.lane == COMPUTE]


def sent(timeline: Timeline) -> list[tuple[str, int | None, int, int]]:
    return [
        (s.label, s.ready_ns, s.start_ns, s.stop_ns)
        for s in timeline.spans
        if s.lane == COMMUNICATION
    ]


def test_waits_are_cut_out_of_what_they_lay_in() -> None:
    timeline = shown()
    assert timeline.iteration_ns == PERIOD
    # The 20 between the backward pass and the next forward pass come first.
    assert computing(timeline) == [
        ("data", 0, 20, "data loading"),
        ("forward", 20, 25, "(between modules)"),
        ("wait", 25, 45, "a"),
        ("update", 45, 48, "update before a"),
        ("forward", 48, 50, "(between modules)"),
        ("forward", 50, 70, "a"),
        ("forward", 70, 100, "b"),
        ("backward", 100, 130, "backward"),
        ("backward", 130, 180, "gradient of a"),
    ]
    assert timeline.stall_ns() == 20
    assert [s.size_bytes for s in timeline.spans if s.kind == "message"] == [800, 400]


B = ("b", 130, 135, 170)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        # Issued 20 before the period's end, 20 of it in what is shown at the front, 25 after.
        ([*BEFORE, OWN], [("a", 0, 0, 45), B]),
        # Its own round is known; it was not finished when the iteration ended.
        ([*BEFORE, OWN, message(1, 170, 172, 400)], [("a", 0, 2, 45), B]),
        # It was ready and issued before the last gradient.
        ([message(1, -40, -35, 25), OWN], [("a", 0, 0, 45), B, ("a", 160, 165, 180)]),
        ([message(1, -10, 10, 25), OWN], [("a", 10, 30, 45), B]),
    ],
    ids=["round before", "own round", "cut by the end of the period", "issued in forward"],
)
def test_messages_that_go_on_in_the_next_iteration(
    messages: list[MessageTimes], expected: list[tuple[str, int, int, int]]
) -> None:
    assert sent(shown(messages)) == expected


def test_messages_during_our_walk_are_shown_without_it() -> None:
    found = sent(shown([message(1, -10, 60, 85), message(0, -70, 85, 100)], []))
    assert {("a", 10, 80, 100), ("b", 0, 100, 110)} <= set(found)


def test_a_step_of_what_had_arrived_is_an_update() -> None:
    first, *_, backward, update = computing(shown(of=STEPPED))
    assert first == ("data", 0, 10, "data loading")
    # What the user's loop did between the backward pass and the step has no name.
    assert backward == ("backward", 120, 170, "gradient of a")
    assert update == ("update", 176, 180, "optimizer")


def test_where_the_update_waits_for_everything_that_is_a_wait() -> None:
    timeline = shown([OWN, LAST], [], of=STEPPED, plan=UPDATE)
    assert ("wait", 170, 175, "all gradients") in computing(timeline)
    assert timeline.stall_ns() == 5
    without_step = shown([OWN, LAST], [], plan=UPDATE)
    assert ("wait", 175, 180, "all gradients") in computing(without_step)
    assert ("data", 0, 15, "data loading") in computing(without_step)
    assert without_step.iteration_ns == PERIOD


def test_a_wait_that_a_gate_has_noted_is_not_shown_twice() -> None:
    noted = wait("everything", 171, 174, 178)
    assert computing(shown([OWN, LAST], [noted], of=STEPPED, plan=UPDATE))[-4:] == [
        ("wait", 170, 171, "all gradients"),
        ("wait", 171, 174, "everything"),
        ("update", 174, 178, "update before everything"),
        ("update", 178, 180, "optimizer"),
    ]


def test_decoupled_all_reduces_are_named() -> None:
    halves = (replace(TO_A, collective=half) for half in ("reduce-scatter", "all-gather"))
    own = [OWN, message(1, 130, 140, 150), message(2, 150, 150, 160)]
    timeline = shown(own, [], plan=replace(PLAN, messages=(TO_B, *halves)))
    assert [label for label, *_ in sent(timeline)] == ["b", "reduce-scatter a", "all-gather a"]


def test_without_messages_and_waits_the_computation_remains() -> None:
    timeline = shown([], [])
    assert sent(timeline) == []
    assert [kind for kind, *_ in computing(timeline)].count("forward") == 3


class DeviceClock(CudaClock):
    """Stamps are hundredths of a nanosecond of a device's clock of its own, 9 s ahead."""

    def __init__(self, now: int) -> None:
        self.now = now

    def stamp(self) -> Any:
        return self.now

    def synchronize(self) -> None:
        pass

    def between_ns(self, earlier: Any, later: Any) -> int:
        return int(later - earlier)


def test_a_devices_stamps_are_related_to_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DeviceClock(9_000_000 + 500)  # 500 after the iteration began
    events = [e._replace(stamp=e.stamp - START + 9_000_000) for e in EVENTS]
    shifted = DEFERRED._replace(events=events, end_stamp=9_000_000 + 190)
    monkeypatch.setattr("time.perf_counter_ns", lambda: START + 500)
    times = EngineTimes([*BEFORE, OWN], [WAIT])
    assert timeline_of(shifted, times, PLAN, clock) == shown()


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[MessageTimes], list[WaitTimes]]:
    """Draw messages of two rounds, one after the other, and waits of the forward pass."""
    messages = []
    for first in (-190, 0):
        free = first
        for number in (0, 1):
            ready = first + draw(st.integers(100, 180))
            issued = max(ready, free) + draw(st.integers(0, 5))
            free = issued + draw(st.integers(0, 60))
            messages.append(message(number, ready, issued, free))
    if draw(st.booleans()):
        messages = [m for m in messages if m.finished_ns <= START + 190]
    ends = sorted(draw(st.lists(st.integers(0, 80), min_size=6, max_size=6)))
    waits = [wait("a", *ends[:3]), wait("b", *ends[3:])]
    return messages, waits


@given(rounds())
def test_nothing_is_lost_or_shown_twice(drawn: tuple[list[MessageTimes], list[WaitTimes]]) -> None:
    messages, waits = drawn
    timeline = shown(messages, waits)
    on_device = [s for s in timeline.spans if s.lane == COMPUTE]
    # The compute lane is full, and one thing at a time.
    assert on_device[0].start_ns == 0
    assert on_device[-1].stop_ns == timeline.iteration_ns == PERIOD
    for before, after in itertools.pairwise(on_device):
        assert before.stop_ns == after.start_ns
    assert timeline.stall_ns() == sum(g.arrived_ns - g.began_ns for g in waits)
    # At most what was under way, less what passed beside the walk, shown once a message.
    for number, label in ((0, "b"), (1, "a")):
        spans = [s for s in timeline.spans if s.kind == "message" and s.label == label]
        assert active_ns(union(spans)) == sum(s.stop_ns - s.start_ns for s in spans)
        if any(m.message == number for m in messages):
            longest = max(m.finished_ns - m.issued_ns for m in messages if m.message == number)
            assert active_ns(union(spans)) <= 2 * longest


def test_buckets_of_ddp_are_shown_from_when_the_one_before_was_done() -> None:
    stamps = ((1, 130, 175), (0, 125, 160))
    exchanges = [BucketStamps(n, START + began, [START + ended]) for n, began, ended in stamps]
    timeline = timeline_of(STEPPED, exchanges, UPDATE, CpuClock())
    assert sent(timeline) == [("b", 125, 125, 160), ("a", 130, 160, 175)]
    assert ("wait", 170, 175, "all gradients") in computing(timeline)
    assert timeline.iteration_ns == PERIOD
