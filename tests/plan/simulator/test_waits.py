"""What stood still: by hand, and as what is left of an iteration beside its operations."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.plan import Message
from syncline.plan.simulator.messages import message_costs_ns
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.strategy import STRATEGIES
from syncline.plan.simulator.workers import Workers
from syncline.plan.timeline import COMMUNICATION, COMPUTE, Timeline, active_ns, union
from tests import strategies as some
from tests.plan.simulator.chains import CUT, HALVES, Times, chain, layers, line, pieces, plan_of


def timeline_of(*spans: Any, a_ns: int = 0, **fields: object) -> Timeline:
    return predict(HALVES, line(a_ns), plan_of(HALVES, spans, **fields)).timeline


def stood(timeline: Timeline) -> list[tuple[str, int, int]]:
    return [(s.label, s.start_ns, s.stop_ns) for s in timeline.spans if s.kind == "wait"]


def ready(timeline: Timeline) -> list[tuple[str, int | None, int]]:
    return [(s.label, s.ready_ns, s.start_ns) for s in timeline.spans if s.kind == "message"]


@pytest.mark.parametrize("update", [0, 10])
def test_the_end_of_an_iteration_and_an_update_wait_for_all_messages(update: int) -> None:
    profile = chain([50, 50], [50, 50], [100, 100], update=update)
    timeline = predict(profile, line(0), plan_of(profile, [(0, 100), (100, 200)])).timeline
    assert stood(timeline) == [("all gradients", 200, 350)]
    assert ready(timeline) == [("g2", 150, 150), ("g1", 200, 250)]
    assert timeline.records_waits
    assert timeline.iteration_ns == 350 + update


def test_an_operation_waits_for_its_own() -> None:
    timeline = timeline_of(*CUT, wait="need")
    assert timeline.iteration_ns == 300
    # The rest of the round before stands at the window's beginning.
    assert min(s.start_ns for s in timeline.spans if s.lane == COMMUNICATION) == 0
    assert timeline.stall_ns() == 100
    assert {label for label, _, _ in stood(timeline)} == {"f1"}
    # The line never idles: what is ready later was sent later.
    assert timeline.order_stall_ns() == 0
    assert timeline.link_share() == 200 / 300


def test_what_follows_one_at_a_time_is_handed_over_first() -> None:
    network = msgspec.structs.replace(line(0), issue_gap_s=1e-8)
    needed = plan_of(HALVES, CUT, wait="need")
    assert message_costs_ns(network, needed) == [60, 110, 60]
    assert predict(HALVES, network, needed).timeline.iteration_ns == 330
    # Two at once hide it behind each other, and DDP's reducer hands over all buckets at once.
    for change in ({"in_flight": 2}, {"wait": "update"}):
        other = msgspec.structs.replace(needed, **change)
        assert message_costs_ns(network, other) == [50, 100, 50]


def test_a_fixed_order_idles_the_line() -> None:
    timeline = timeline_of((100, 200), (0, 100))
    assert ready(timeline) == [("g1", 200, 200), ("g2", 150, 300)]
    assert timeline.order_stall_ns() == 50


def test_what_is_held_back_was_ready_before() -> None:
    profile = chain([10], [10], [10])
    plan = plan_of(profile, [Message(start=0, stop=10, delay_s=7e-9)])
    timeline = predict(profile, line(0), plan).timeline
    assert ready(timeline) == [("g1", 20, 27)]
    assert timeline.iteration_ns == 27 + 10


def test_an_all_gather_is_ready_when_its_sums_are() -> None:
    scatter = ((0, 100, "reduce-scatter"), (100, 200, "reduce-scatter"))
    timeline = timeline_of(*scatter, (0, 200, "all-gather"))
    assert [r[1:] for r in ready(timeline)] == [(150, 150), (200, 200), (250, 250)]


def test_a_credit_is_no_matter_of_being_ready() -> None:
    timeline = timeline_of((0, 50), (50, 100), (100, 150), (150, 200), a_ns=30, in_flight=2)
    begun = [r for r in ready(timeline) if r[0].startswith("latency")]
    assert [r[1] for r in begun] == [150, 150, 200, 200]
    # What a message transmits goes on; it does not become ready again.
    assert [r[1] for r in ready(timeline) if not r[0].startswith("latency")] == [None] * 4


def test_fast_workers_wait_for_slow_ones() -> None:
    timeline = predict(
        HALVES, line(0), plan_of(HALVES, [(0, 200)]), workers=Workers(stragglers=((1, 2.0),))
    ).timeline
    assert timeline.iteration_ns == 600
    lanes = {s.lane: (s.start_ns, s.stop_ns) for s in timeline.spans if s.kind == "wait"}
    assert sorted(lanes.values()) == [(200, 600), (400, 600)]


def test_where_operations_have_no_order_nothing_is_said() -> None:
    unlimited = msgspec.structs.replace(STRATEGIES["loop"], compute="unlimited")
    timeline = predict(HALVES, line(0), plan_of(HALVES, [(0, 200)]), strategy=unlimited).timeline
    assert stood(timeline) == []


@some.many
@given(
    layers, st.integers(0, 300), st.integers(1, 3), st.sampled_from(["update", "need"]), st.data()
)
def test_operations_and_waits_fill_an_iteration(
    times: Times, latency_ns: int, in_flight: int, wait: str, data: st.DataObject
) -> None:
    profile = chain(*times, update=data.draw(st.integers(0, 50)), io=3)
    plan = plan_of(profile, data.draw(pieces(profile)), wait=wait, in_flight=in_flight)
    timeline = predict(profile, line(latency_ns), plan).timeline
    on_device = sorted(
        (s.start_ns, s.stop_ns)
        for s in timeline.spans
        if s.lane == COMPUTE and s.start_ns < s.stop_ns
    )
    assert on_device[0][0] == 0
    assert on_device[-1][1] == timeline.iteration_ns
    for before, after in itertools.pairwise(on_device):
        assert before[1] == after[0]
    waited = active_ns(union(s for s in timeline.spans if s.kind == "wait"))
    assert waited == timeline.stall_ns()
    for span in timeline.spans:
        if span.kind == "message" and span.lane == COMMUNICATION and in_flight == 1:
            assert span.ready_ns is not None
