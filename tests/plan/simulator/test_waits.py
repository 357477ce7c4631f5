"""What stood still: by hand, and as what is left of an iteration beside its operations."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.plan import Message
from syncline.plan.simulator.messages import message_costs_ns
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.strategy import STRATEGIES
from syncline.plan.simulator.workers import Workers
from syncline.plan.timeline import COMMUNICATION, COMPUTE, Timeline, active_ns, union
from tests import strategies as some
from tests.plan.simulator.chains import NS, chain, layers, line, plan_of

HALVES = chain([50, 50], [50, 50], [100, 100])
"""g2 is ready at 150, g1 at 200; each takes 100 to exchange."""


def stood(timeline: Timeline) -> list[tuple[str, int, int]]:
    return [(s.label, s.start_ns, s.stop_ns) for s in timeline.spans if s.kind == "wait"]


def ready(timeline: Timeline) -> list[tuple[str, int | None, int]]:
    return [(s.label, s.ready_ns, s.start_ns) for s in timeline.spans if s.kind == "message"]


def test_the_end_of_an_iteration_waits_for_all_messages() -> None:
    timeline = predict(HALVES, line(0), plan_of(HALVES, [(0, 100), (100, 200)])).timeline
    assert stood(timeline) == [("all gradients", 200, 350)]
    assert ready(timeline) == [("g2", 150, 150), ("g1", 200, 250)]
    assert timeline.records_waits


def test_an_update_waits_for_all_messages() -> None:
    profile = chain([50, 50], [50, 50], [100, 100], update=10)
    timeline = predict(profile, line(0), plan_of(profile, [(0, 100), (100, 200)])).timeline
    assert stood(timeline) == [("all gradients", 200, 350)]
    assert timeline.iteration_ns == 360


def test_an_operation_waits_for_its_own() -> None:
    cut = plan_of(HALVES, [(0, 50), (100, 200), (50, 100)], wait="need")
    timeline = predict(HALVES, line(0), cut).timeline
    assert timeline.iteration_ns == 300
    assert timeline.stall_ns() == 100
    assert {label for label, _, _ in stood(timeline)} == {"f1"}
    # The line never idles: what is ready later was sent later.
    assert timeline.order_stall_ns() == 0
    assert timeline.link_share() == 200 / 300


def test_what_follows_one_at_a_time_is_handed_over_first() -> None:
    cuts = [(0, 50), (100, 200), (50, 100)]
    network = msgspec.structs.replace(line(0), issue_gap_s=10 * NS)
    needed = plan_of(HALVES, cuts, wait="need")
    assert message_costs_ns(network, needed) == [60, 110, 60]
    assert predict(HALVES, network, needed).timeline.iteration_ns == 330
    # Two at once hide it behind each other, and DDP's reducer hands over all buckets at once.
    for other in (
        msgspec.structs.replace(needed, in_flight=2),
        msgspec.structs.replace(needed, wait="update"),
    ):
        assert message_costs_ns(network, other) == [50, 100, 50]


def test_a_fixed_order_idles_the_line() -> None:
    in_turn = plan_of(HALVES, [(100, 200), (0, 100)])
    timeline = predict(HALVES, line(0), in_turn).timeline
    assert ready(timeline) == [("g1", 200, 200), ("g2", 150, 300)]
    assert timeline.order_stall_ns() == 50


def test_what_is_held_back_was_ready_before() -> None:
    profile = chain([10], [10], [10])
    plan = plan_of(profile, [Message(start=0, stop=10, delay_s=7 * NS)])
    assert ready(predict(profile, line(0), plan).timeline) == [("g1", 20, 27)]


def test_an_all_gather_is_ready_when_its_sums_are() -> None:
    whole = (0, 200)
    plan = plan_of(
        HALVES,
        [
            Message(start=0, stop=100, collective="reduce-scatter"),
            Message(start=100, stop=200, collective="reduce-scatter"),
            Message(start=whole[0], stop=whole[1], collective="all-gather"),
        ],
    )
    assert [r[1:] for r in ready(predict(HALVES, line(0), plan).timeline)] == [
        (150, 150),
        (200, 200),
        (250, 250),
    ]


def test_a_credit_is_no_matter_of_being_ready() -> None:
    pieces = plan_of(HALVES, [(0, 50), (50, 100), (100, 150), (150, 200)], in_flight=2)
    timeline = predict(HALVES, line(30), pieces).timeline
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
    times: tuple[list[int], list[int], list[int]],
    latency_ns: int,
    in_flight: int,
    wait: str,
    data: st.DataObject,
) -> None:
    forward, backward, sizes = times
    profile = chain(forward, backward, sizes, update=data.draw(st.integers(0, 50)), io=3)
    total = sum(sizes)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=5)))
    spans = list(itertools.pairwise([0, *(c for c in cuts if c < total), total]))
    plan = plan_of(profile, data.draw(st.permutations(spans)), wait=wait, in_flight=in_flight)
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
