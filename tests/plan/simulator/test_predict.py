"""The simulated iteration against the closed forms of the two papers."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import MismatchError, UserError
from syncline.plan.network import PRESETS, Contention, Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.table import CANDIDATES
from syncline.plan.profile import Gradient, Operation, Phase, Profile
from syncline.plan.simulator.predict import predict, predict_iteration_s
from syncline.plan.timeline import COMMUNICATION, COMPUTE, Span, Timeline
from tests import strategies as some
from tests.plan.documents import NETWORK, PLAN, PROFILE

NS = 1e-9


def layered(
    forward_ns: list[int],
    backward_ns: list[int],
    elements: list[int],
    *,
    io_ns: int = 0,
    h2d_ns: int = 0,
    update_ns: int = 0,
) -> Profile:
    """Return an L-layer network as the papers have it; lists are of layers 1 to L.

    The phases of dag-model, section III: fetch, copy, forward 1 to L, backward L to 1, update.
    """
    durations: list[tuple[str, Phase, int]] = [("fetch", "data", io_ns), ("copy", "copy", h2d_ns)]
    durations += [(f"f{i}", "forward", t) for i, t in enumerate(forward_ns, start=1)]
    first_backward = len(durations)
    layers = len(backward_ns)
    durations += [(f"b{layers - i}", "backward", t) for i, t in enumerate(reversed(backward_ns))]
    durations.append(("update", "update", update_ns))
    return Profile(
        model="layers",
        device="cpu",
        workers=4,
        iterations=1,
        operations=tuple(
            Operation(name=name, phase=phase, duration_s=t * NS, after=(i - 1,) if i else ())
            for i, (name, phase, t) in enumerate(durations)
        ),
        gradients=tuple(
            Gradient(name=f"w{layers - i}", elements=count, ready_after=first_backward + i)
            for i, count in enumerate(reversed(elements))
        ),
    )


def iteration_ns(profile: Profile, network: Network, planner: str) -> int:
    return predict(profile, network, PLANNERS[planner].plan(profile, network)).timeline.iteration_ns


times = st.lists(st.integers(0, 3000), min_size=5, max_size=5)
counts = st.lists(st.integers(1, 500), min_size=5, max_size=5)
phase = st.integers(0, 3000)


@some.few
@given(times, times, counts, phase, phase, phase)
def test_dag_model_equation_1_one_worker(
    forward: list[int], backward: list[int], elements: list[int], io: int, h2d: int, update: int
) -> None:
    """t_iter = t_io + t_h2d + t_f + t_b + t_u."""
    profile = layered(forward, backward, elements, io_ns=io, h2d_ns=h2d, update_ns=update)
    alone = Network.line(workers=1, a_s=0, b_s_per_byte=0)
    assert iteration_ns(profile, alone, "wfbp") == io + h2d + sum(forward) + sum(backward) + update


@some.few
@given(times, times, counts, phase, phase, phase, some.integer_curves())
def test_dag_model_equation_2_nothing_overlaps(
    forward: list[int],
    backward: list[int],
    elements: list[int],
    io: int,
    h2d: int,
    update: int,
    curve: some.IntegerCurve,
) -> None:
    """t_iter = t_io + t_h2d + t_f + t_b + sum of t_c + t_u; also MG-WFBP, Eq. 3."""
    profile = layered(forward, backward, elements, io_ns=io, h2d_ns=h2d, update_ns=update)
    # Naive S-SGD sends layer by layer, but only once all are ready.
    last = max(g.ready_after for g in profile.gradients)
    gradients = tuple(msgspec.structs.replace(g, ready_after=last) for g in profile.gradients)
    naive = msgspec.structs.replace(profile, gradients=gradients)
    communication = sum(curve.cost_ns(4 * count) for count in elements)
    expected = io + h2d + sum(forward) + sum(backward) + communication + update
    assert iteration_ns(naive, curve.network(), "wfbp") == expected


@some.few
@given(times, times, counts, some.integer_curves())
def test_mg_wfbp_equations_7_and_8_wait_free_backpropagation(
    forward: list[int], backward: list[int], elements: list[int], curve: some.IntegerCurve
) -> None:
    profile = layered(forward, backward, elements)
    L = len(elements)
    t_f, t_b, t_c = sum(forward), [0, *backward], [0, *(curve.cost_ns(4 * n) for n in elements)]
    tau_b, tau_c = [0] * (L + 1), [0] * (L + 1)
    tau_b[L] = t_f  # Eq. 6
    for i in range(L - 1, 0, -1):
        tau_b[i] = tau_b[i + 1] + t_b[i + 1]
    tau_c[L] = tau_b[L] + t_b[L]  # Eq. 7
    for i in range(L - 1, 0, -1):
        tau_c[i] = max(tau_c[i + 1] + t_c[i + 1], tau_b[i] + t_b[i])
    plan = PLANNERS["wfbp"].plan(profile, curve.network())
    timeline = predict(profile, curve.network(), plan).timeline
    sent = [span for span in timeline.spans if span.lane == COMMUNICATION]
    assert [span.start_ns for span in sent] == tau_c[:0:-1]
    # Eq. 8, in both of its forms.
    assert timeline.iteration_ns == t_f + t_b[L] + (tau_c[1] - tau_c[L]) + t_c[1]
    assert timeline.iteration_ns == t_c[1] + max(tau_c[2] + t_c[2], tau_b[1] + t_b[1])


@some.few
@given(times, times, counts, some.integer_curves())
def test_mg_wfbp_equation_9_single_layer(
    forward: list[int], backward: list[int], elements: list[int], curve: some.IntegerCurve
) -> None:
    """t_iter = t_f + t_b + t_c, with t_c of one message."""
    profile = layered(forward, backward, elements)
    t_c = curve.cost_ns(4 * sum(elements))
    assert iteration_ns(profile, curve.network(), "single") == sum(forward) + sum(backward) + t_c


@some.few
@given(times, times, counts, phase, some.integer_curves())
def test_dag_model_equation_5_what_is_not_hidden_is_paid(
    forward: list[int],
    backward: list[int],
    elements: list[int],
    update: int,
    curve: some.IntegerCurve,
) -> None:
    """t_iter = t_f + t_b + t_c^no (+ t_u) where loading is not the bottleneck."""
    profile = layered(forward, backward, elements, update_ns=update)
    for planner in CANDIDATES:
        plan = planner.plan(profile, curve.network())
        forecast = predict(profile, curve.network(), plan)
        computed = sum(forward) + sum(backward)
        sent = [span for span in forecast.timeline.spans if span.lane == COMMUNICATION]
        after = max(sent[-1].stop_ns - computed, 0)
        assert forecast.timeline.iteration_ns == computed + after + update
        assert forecast.prediction.exposed_s == pytest.approx(after * NS, abs=1e-15)
        hidden = sum(max(min(s.stop_ns, computed) - s.start_ns, 0) for s in sent)
        if after:  # the channel is never idle once the backward pass is over
            assert after + hidden == sum(s.stop_ns - s.start_ns for s in sent)


# What always holds


anything = given(some.layer_profiles(max_layers=12), some.integer_curves(falls=True), st.data())


def any_plan(data: st.DataObject, profile: Profile, workers: int) -> Plan:
    """Draw a plan with merged and split tensors."""
    elements = sum(g.elements for g in profile.gradients)
    cuts = data.draw(st.sets(st.integers(1, elements - 1), max_size=8)) if elements > 1 else ()
    whole = PLANNERS["single"].plan(profile, Network.line(workers=workers, a_s=0, b_s_per_byte=0))
    bounds = [0, *sorted(cuts), elements]
    messages = tuple(Message(start=a, stop=b) for a, b in itertools.pairwise(bounds))
    return msgspec.structs.replace(whole, messages=messages)


@some.many
@anything
def test_no_iteration_is_below_the_bound(
    profile: Profile, curve: some.IntegerCurve, data: st.DataObject
) -> None:
    network = msgspec.structs.replace(curve.network(), contention=data.draw(some.contentions(2)))
    plan = any_plan(data, profile, network.workers)
    row = predict(profile, network, plan).prediction
    bound_s = max(profile.computation_s, curve.curve().cheapest_s(profile.gradient_bytes))
    assert bound_s <= row.iteration_s + 1e-15
    # The row's own bound leaves no rounding: nothing is ever "below the bound".
    assert row.lower_bound_s <= row.iteration_s
    assert row.lower_bound_s >= bound_s - 1e-15
    assert row.distance_to_bound >= 0
    assert row.computation_s == profile.computation_s
    assert row.exposed_s >= 0
    assert row.messages == len(plan.messages)
    assert row.communication_s == pytest.approx(
        sum(curve.cost_ns(size) for size in plan.message_bytes()) * NS
    )


@some.few
@given(some.profiles(), some.networks())
def test_rounding_never_puts_an_iteration_below_the_bound(
    profile: Profile, network: Network
) -> None:
    for planner in CANDIDATES:
        try:
            row = predict(profile, network, planner.plan(profile, network)).prediction
        except UserError as error:
            assert "longer than" in str(error)  # noqa: PT017 - success is as good
            continue
        assert row.lower_bound_s <= row.iteration_s
        least = max(profile.computation_s, network.all_reduce.cheapest_s(profile.gradient_bytes))
        assert row.lower_bound_s >= least * (1 - 1e-9) - 1e-8


@some.many
@anything
def test_a_slower_network_is_never_faster(
    profile: Profile, curve: some.IntegerCurve, data: st.DataObject
) -> None:
    factor, more = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 500))
    later = data.draw(st.integers(0, 500))  # a further cost of all but the smallest messages
    slower = some.IntegerCurve(
        tuple(
            (start, cost * factor + more + (later if start else 0), slope * factor)
            for start, cost, slope in curve.segments
        )
    )
    plan = any_plan(data, profile, 4)
    fast = predict(profile, curve.network(), plan).timeline.iteration_ns
    assert predict(profile, slower.network(), plan).timeline.iteration_ns >= fast


@some.many
@anything
def test_two_runs_are_equal_and_on_whole_nanoseconds(
    profile: Profile, curve: some.IntegerCurve, data: st.DataObject
) -> None:
    network = msgspec.structs.replace(curve.network(), contention=data.draw(some.contentions(4)))
    plan = any_plan(data, profile, network.workers)
    first, second = (predict(profile, network, plan) for _ in range(2))
    assert first == second
    assert first.timeline.to_json() == second.timeline.to_json()
    assert all(type(t) is int for s in first.timeline.spans for t in (s.start_ns, s.stop_ns))
    assert predict_iteration_s(profile, network, plan) == first.prediction.iteration_s


def by_lane(timeline: Timeline) -> dict[str, list[Span]]:
    ran = [s for s in timeline.spans if s.kind != "wait"]
    return {lane: [s for s in ran if s.lane == lane] for lane in timeline.lanes()}


@some.many
@anything
def test_the_timeline_obeys_the_rules(
    profile: Profile, curve: some.IntegerCurve, data: st.DataObject
) -> None:
    contention = data.draw(st.just(Contention()) | some.contentions(2))
    network = msgspec.structs.replace(curve.network(), contention=contention)
    plan = any_plan(data, profile, network.workers)
    timeline = predict(profile, network, plan).timeline
    lanes = by_lane(timeline)
    assert set(lanes) == {COMPUTE, COMMUNICATION}
    for spans in lanes.values():  # no two spans of a lane overlap
        for before, after in itertools.pairwise(spans):
            assert before.stop_ns <= after.start_ns
    computing, sent = lanes[COMPUTE], lanes[COMMUNICATION]
    assert [span.label for span in computing] == [o.name for o in profile.operations]
    assert [span.kind for span in computing] == [o.phase for o in profile.operations]
    assert [span.size_bytes for span in sent] == list(plan.message_bytes())
    for tensors, span in zip(plan.message_tensors(), sent, strict=True):
        for index in tensors:  # every message starts after its gradients are ready
            assert span.start_ns >= computing[profile.gradients[index].ready_after].stop_ns
    for span in computing:  # what needs exchanged gradients waits for all messages
        if span.kind in ("finalize", "update"):
            assert span.start_ns >= sent[-1].stop_ns
        for before in profile.operations[computing.index(span)].after:
            assert span.start_ns >= computing[before].stop_ns
    assert timeline.iteration_ns == max(span.stop_ns for span in timeline.spans)
    alone_s = math.fsum(operation.duration_s for operation in profile.operations)
    handling_s = contention.handling_s(len(plan.messages))
    for span, operation in zip(computing, profile.operations, strict=True):
        longer_s = handling_s * operation.duration_s / alone_s if alone_s else 0.0
        alone = round((operation.duration_s + longer_s) * 1e9)
        took = span.stop_ns - span.start_ns
        assert alone - 1 <= took <= math.ceil(alone * contention.computing * 1.0001) + 2
        assert contention.computing > 1 or took == pytest.approx(alone, abs=1)


def test_finalize_and_update_wait_for_all_messages() -> None:
    operations = (
        Operation(name="b", phase="backward", duration_s=1.0),
        Operation(name="unpack", phase="finalize", duration_s=1.0),
        Operation(name="next", phase="forward", duration_s=1.0),
        Operation(name="step", phase="update", duration_s=1.0),
    )
    profile = Profile(
        model="m",
        device="cpu",
        workers=2,
        iterations=1,
        operations=operations,
        gradients=(Gradient(name="g", elements=1, ready_after=0),),
    )
    network = Network.line(workers=2, a_s=5.0, b_s_per_byte=0)
    timeline = predict(profile, network, PLANNERS["single"].plan(profile, network)).timeline
    starts = [s.start_ns / 1e9 for s in by_lane(timeline)[COMPUTE]]
    assert starts == [0, 6, 7, 8]


# Contention


@some.few
@anything
def test_contention_of_one_is_none(
    profile: Profile, curve: some.IntegerCurve, data: st.DataObject
) -> None:
    plan = any_plan(data, profile, 4)
    without = predict(profile, curve.network(), plan)
    nearly = msgspec.structs.replace(curve.network(), contention=Contention.of_both(1 + 1e-9))
    # The second takes the other path, in which tasks may change their speed.
    slowed = predict(profile, nearly, plan)
    assert slowed.timeline.iteration_ns == without.timeline.iteration_ns
    assert slowed.timeline.spans == without.timeline.spans


def overlapping(transfer_ns: int, compute_ns: int, a_ns: int = 0) -> tuple[Profile, Network, Plan]:
    """Return a message that is ready at once and a computation beside it."""
    operations = (
        Operation(name="first", phase="backward", duration_s=0),
        Operation(name="rest", phase="backward", duration_s=compute_ns * NS),
    )
    profile = Profile(
        model="m",
        device="cpu",
        workers=2,
        iterations=1,
        operations=operations,
        gradients=(Gradient(name="g", elements=transfer_ns // 4, ready_after=0),),
    )
    network = Network.line(workers=2, a_s=a_ns * NS, b_s_per_byte=NS)
    return profile, network, PLANNERS["single"].plan(profile, network)


@pytest.mark.parametrize(
    ("transfer_ns", "compute_ns", "computing", "exchange", "expected_ns"),
    [
        (1000, 3000, 2.0, 1.0, 3500),  # the message takes 1000, in which 500 are computed
        (3000, 1000, 2.0, 1.0, 3000),
        (1000, 3000, 1.0, 2.0, 3000),
        (3000, 1000, 1.0, 2.0, 3500),  # computed at 1000, with 2500 of the message left
        (1000, 1000, 4.0, 2.0, 2500),  # the message takes 2000, in which 500 are computed
        (1000, 1000, 2.0, 4.0, 2500),
    ],
)
def test_each_has_its_own_factor(
    transfer_ns: int, compute_ns: int, computing: float, exchange: float, expected_ns: int
) -> None:
    profile, network, plan = overlapping(transfer_ns, compute_ns)
    contention = Contention(computing=computing, exchange=exchange)
    slow = msgspec.structs.replace(network, contention=contention)
    assert predict(profile, slow, plan).timeline.iteration_ns == expected_ns


@pytest.mark.parametrize(
    ("transfer_ns", "compute_ns", "a_ns", "contention", "expected_ns"),
    [
        (1000, 1000, 0, 2.0, 2000),  # fully overlapped: the sum
        (1000, 3000, 0, 2.0, 4000),  # the message takes 2000, in which 1000 are computed
        (3000, 1000, 0, 2.0, 4000),
        (1000, 1000, 0, 1.5, 1500),
        (1000, 4000, 0, 1.5, 4500),  # the message takes 1500, in which 1000 are computed
        # The latency contends like the rest of a message of 1500.
        (1000, 1000, 500, 2.0, 2500),  # computed at 2000, with 500 of the message left
        (1000, 300, 500, 2.0, 1800),  # computed at 600, with 1200 of the message left
    ],
)
def test_contention_by_hand(
    transfer_ns: int, compute_ns: int, a_ns: int, contention: float, expected_ns: int
) -> None:
    profile, network, plan = overlapping(transfer_ns, compute_ns, a_ns)
    slow = msgspec.structs.replace(network, contention=Contention.of_both(contention))
    found = predict(profile, slow, plan).timeline.iteration_ns
    assert found == pytest.approx(expected_ns, abs=2 if contention == 1.5 else 0)


@some.few
@given(st.integers(0, 10**6).map(lambda n: 4 * n), st.integers(0, 4 * 10**6))
def test_contention_of_two_gains_nothing_by_overlapping(transfer_ns: int, compute_ns: int) -> None:
    profile, network, plan = overlapping(transfer_ns, compute_ns)
    slow = msgspec.structs.replace(network, contention=Contention.of_both(2.0))
    assert predict(profile, slow, plan).timeline.iteration_ns == transfer_ns + compute_ns


# What does not fit


def test_a_plan_for_another_model() -> None:
    other = msgspec.structs.replace(PROFILE, gradients=PROFILE.gradients[:1])
    with pytest.raises(MismatchError, match="does not fit the profile and network: the plan has 2"):
        predict(other, NETWORK, PLAN)


def test_a_plan_for_other_workers() -> None:
    with pytest.raises(MismatchError, match="the plan is for 2 workers, this job has 16"):
        predict(PROFILE, PRESETS["10gbe-k80"], PLAN)


def test_a_plan_whose_tensors_are_in_another_order() -> None:
    """Tensors are found by name: the readiness is the profile's, not that of the plan's place."""
    swapped = msgspec.structs.replace(
        PLAN,
        tensors=PLAN.tensors[::-1],
        messages=(Message(start=0, stop=30), Message(start=30, stop=40)),
    )
    timeline = predict(PROFILE, NETWORK, swapped).timeline
    first = next(span for span in timeline.spans if span.lane == COMMUNICATION)
    assert first.label == "w1"
    assert first.start_ns >= 1_000_000_000  # w1 is ready after 1 s, w2 after 0.75 s
