"""Plans whose updates wait for all sums: against the simulator, the bound, and all other orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from syncline.plan.cost import CostCurve
from syncline.plan.network import PRESETS, Network
from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.auto import as_trained
from syncline.plan.planners.dear import Dear
from syncline.plan.planners.decoupled import (
    ACCEPTED_DELAY,
    DecoupledRound,
    Order,
    in_equal_parts,
    plan_decoupled,
    with_fewer_groups,
)
from syncline.plan.planners.merge import Merge
from syncline.plan.planners.overlap import Overlap
from syncline.plan.planners.slices import plan_of, whole_tensors
from syncline.plan.profile import Norm, Profile
from syncline.plan.simulator.bound import network_bound_ns, terms
from syncline.plan.simulator.predict import predict_iteration_s
from tests import strategies as some
from tests.plan.planners.instances import chain, chains, partitions


def line(latency_ns: int, ns_per_byte: int) -> Network:
    return Network.line(workers=2, a_s=latency_ns / 1e9, b_s_per_byte=ns_per_byte / 1e9)


def with_norm(profile: Profile) -> Profile:
    return msgspec.structs.replace(profile, norm="2")


def predicted_ns(profile: Profile, network: Network, plan: Plan) -> float:
    trained = as_trained(profile, plan, network, defers=True)
    return predict_iteration_s(profile, network, trained) * 1e9


def round_of(profile: Profile, network: Network, in_flight: int) -> DecoupledRound:
    tensors = [t for t in whole_tensors(profile) if t.size_bytes]
    return DecoupledRound.of(tensors, profile, network, in_flight)


Wait = dict[str, Any]
networks = st.builds(line, st.integers(0, 2000), st.integers(0, 20))
flights = pytest.mark.parametrize("in_flight", [1, 2])
NORM, SHARDED = {"norm": "2"}, {"sharded": True}
"""What updates wait for: a norm, or that a worker has updated its share."""
waits = pytest.mark.parametrize("wait", [NORM, SHARDED, NORM | SHARDED])


@flights
@waits
@given(profile=chains(), network=networks)
def test_simulator_agrees(profile: Profile, network: Network, wait: Wait, in_flight: int) -> None:
    profile = msgspec.structs.replace(profile, **wait)
    plan = plan_decoupled("x", profile, network, in_flight=in_flight)
    round_ = round_of(profile, network, in_flight)
    end_ns = round_.end_ns(*with_fewer_groups(round_, *round_.search()))
    expected_ns = max(terms(profile).base_ns, end_ns)
    found_ns = predicted_ns(profile, network, plan)
    if any(m.collective == "all-reduce" for m in plan.messages):  # it pays one latency, not two
        assert found_ns <= expected_ns + len(plan.messages)
    else:
        assert found_ns == pytest.approx(expected_ns, abs=len(plan.messages))


@flights
@given(profile=chains(), network=networks)
def test_fewer_groups_end_hardly_later(profile: Profile, network: Network, in_flight: int) -> None:
    round_ = round_of(with_norm(profile), network, in_flight)
    lasts, order = round_.search()
    fewer, merged = with_fewer_groups(round_, lasts, order)
    assert set(fewer) <= set(lasts)
    # It raises where a group is not summed once and gathered once after that.
    assert round_.end_ns(fewer, merged) <= round_.end_ns(lasts, order) * (1 + ACCEPTED_DELAY)


def test_a_message_that_only_fills_an_idle_moment_goes_with_the_next() -> None:
    """The small gradient is there before the large one, and gone before that is ready."""
    round_ = DecoupledRound(
        ready_ns=[1000, 2000],
        size_bytes=[4, 400_000],
        tail_ns=[0, 0],
        need=[1, 0],
        part_cost=CostCurve.line(1e-8, 1e-9),
        gap_ns=0,
        norm_ns=10,
        in_flight=1,
        gathers_last=False,
    )
    separate: Order = [(0, 0, False), (1, 1, False), (1, 1, True), (0, 0, True)]
    found = with_fewer_groups(round_, [0, 1], separate)
    assert found == ([1], [(0, 0, False), (0, 0, True)])
    # Not where it takes the channel's idle time to be done by then.
    large = round_._replace(size_bytes=[100_000, 400_000], ready_ns=[1000, 100_000])
    assert with_fewer_groups(large, [0, 1], separate) == ([0, 1], separate)


@flights
@pytest.mark.parametrize("sharded", [False, True])
@given(profile=chains(), network=networks)
def test_the_bound_holds(profile: Profile, network: Network, sharded: bool, in_flight: int) -> None:
    norm: Norm | None = None if sharded else "2"
    profile = msgspec.structs.replace(profile, sharded=sharded, norm=norm)
    known = terms(profile)
    bound_ns = network_bound_ns(known, network, decoupled=True, norm=not sharded, sharded=sharded)
    for plan in (
        plan_decoupled("x", profile, network, in_flight=in_flight),
        Dear().plan(profile, network),
        msgspec.structs.replace(Merge().plan(profile, network), wait="need", norm=norm),
    ):
        slack_ns = 2 * len(plan.messages)  # the simulator rounds every message
        own = plan.in_shards() if sharded else plan
        assert predict_iteration_s(profile, network, own) * 1e9 >= bound_ns - slack_ns


@some.many
@given(profile=chains(), network=networks)
def test_no_planner_is_better_under_the_constraint(profile: Profile, network: Network) -> None:
    profile = with_norm(profile)
    own = predict_iteration_s(profile, network, Overlap().plan(profile, network))
    for name in PLANNERS:
        plan = PLANNERS[name].plan(profile, network)
        assert plan.norm == ("2" if plan.wait == "need" else None)
        assert own <= predict_iteration_s(profile, network, plan) + 1e-12, name


@given(chains(), networks, st.integers(1, 9), st.sampled_from([None, "2"]))
def test_equal_parts(profile: Profile, network: Network, parts: int, norm: Norm | None) -> None:
    profile = msgspec.structs.replace(profile, norm=norm)
    plan = in_equal_parts(profile, network, parts)
    halved = [m for m in plan.messages if m.collective != "all-gather"]
    assert len(plan.messages) == len(halved) * (2 if norm else 1)
    assert len(halved) <= parts
    edges = {0, *itertools.accumulate(t.elements for t in plan.tensors)}
    assert {edge for m in halved for edge in (m.start, m.stop)} <= edges
    largest = max(t.size_bytes for t in plan.tensors)
    for message in halved:
        size_bytes = 4 * (message.stop - message.start)
        assert size_bytes < profile.gradient_bytes / parts + 1 + largest
    assert (plan.wait, plan.in_flight, plan.norm) == ("need", 2, norm)


def every_order(groups: int) -> Iterator[Order]:
    """Yield every order of sending, sums in ready order, gathers of neighbours merged or not."""
    for cuts in itertools.product((False, True), repeat=groups - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), groups]
        gathers = [(a, b - 1, True) for a, b in itertools.pairwise(bounds)]
        slots = range(groups + len(gathers))
        for permuted in itertools.permutations(gathers):
            for places in itertools.combinations(slots, groups):
                rest = iter(permuted)
                sums = iter((g, g, False) for g in range(groups))
                yield [next(sums) if slot in places else next(rest) for slot in slots]


@flights
@waits
@settings(max_examples=30)
@given(profile=chains(max_layers=3), network=networks)
def test_near_the_best(profile: Profile, network: Network, wait: Wait, in_flight: int) -> None:
    """Of all orders of all groups of whole tensors."""
    profile = msgspec.structs.replace(profile, **wait)
    round_ = round_of(profile, network, in_flight)
    assume(len(round_.ready_ns) == len(profile.gradients))
    ends = []
    for lasts in partitions(len(round_.ready_ns)):
        for order in every_order(len(lasts)):
            try:
                ends.append(round_.end_ns(lasts, order))
            except ValueError:  # a gather before its sum, or before all sums if it must not
                continue
    best_ns = max(min(ends), terms(profile).base_ns)
    plan = plan_decoupled("x", profile, network, in_flight=in_flight)
    found_ns = predicted_ns(profile, network, plan)
    assert found_ns <= 1.02 * best_ns + 6


def test_gathers_wait_for_the_sums_by_hand() -> None:
    """Two layers; half an all-reduce of each takes 100, and the channel is never idle."""
    hundred_ns = [100e-9, 100e-9]
    profile = chain(hundred_ns, [25, 25], hundred_ns)
    plan = plan_decoupled("x", with_norm(profile), line(0, 2), in_flight=1)
    assert [(m.start, m.collective) for m in plan.messages] == [
        (0, "reduce-scatter"),
        (25, "reduce-scatter"),
        (25, "all-gather"),
        (0, "all-gather"),
    ]


def test_many_tensors() -> None:
    draw = random.Random(0)
    gaps_ns = [draw.randint(0, 20_000) for _ in range(1000)]
    elements = [draw.choice((64, 5000, 200_000)) for _ in gaps_ns]
    profile = with_norm(some.profile_of(gaps_ns, elements, forward_ns=10_000_000))
    network = PRESETS["10gbit"].with_workers(8)
    plan = Overlap().plan(profile, network)
    bound_ns = network_bound_ns(terms(profile), network, decoupled=True, norm=True)
    assert predict_iteration_s(profile, network, plan) * 1e9 <= 1.2 * bound_ns
    assert plan_of("x", profile, 8, plan.messages, in_flight=plan.in_flight).norm == "2"


@pytest.mark.parametrize(
    ("lasts", "order", "said"),
    [
        ([1], [(0, 0, False), (0, 0, True), (0, 0, True)], "gathered after that"),
        ([1], [(0, 0, True), (0, 0, False)], "gathered after that"),
        ([0, 1], [(0, 1, False), (0, 1, True)], "none of these groups"),
        ([0, 1], [(1, 1, False), (0, 0, False), (0, 1, True)], "none of these groups"),
        ([0], [(0, 0, False), (0, 0, True)], "does not end with the last tensor"),
        ([1, 0], [], "do not increase"),
    ],
)
def test_what_is_no_order_is_refused(lasts: list[int], order: Order, said: str) -> None:
    profile = chain([0, 0], [25, 25], [0, 0])
    with pytest.raises(ValueError, match=said):
        round_of(profile, line(0, 2), 1).end_ns(lasts, order)
