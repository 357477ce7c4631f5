"""The lower bound: never above what any plan takes, and exact where nothing is in the way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.cost import CostCurve
from syncline.plan.network import Network
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.decoupled import plan_decoupled
from syncline.plan.profile import Profile
from syncline.plan.simulator.bound import (
    Terms,
    least_s_per_byte,
    lower_bound_ns,
    network_bound_ns,
    terms,
)
from syncline.plan.simulator.predict import predict_iteration_s
from tests import strategies as some
from tests.plan.planners import exhaustive
from tests.plan.planners.exhaustive import Instance, Kind, instances, least_end_ns
from tests.plan.planners.instances import chains


def bound_ns(instance: Instance, *, decoupled: bool = False, in_flight: int | None = None) -> int:
    """Return the bound of a round without computation around it."""
    round_ = Terms(instance.ready_ns, instance.elements, instance.tail_ns, base_ns=0)
    return lower_bound_ns(round_, instance.curve.curve(), decoupled=decoupled, in_flight=in_flight)


@some.many
@given(instances())
def test_no_plan_undercuts_it(instance: Instance) -> None:
    for in_flight in (1, 2):
        best = least_end_ns(instance, in_flight)
        assert best is not None
        kinds = [(True, None), (True, in_flight), (False, in_flight)]
        bounds = [bound_ns(instance, decoupled=d, in_flight=f) for d, f in kinds]
        assert [*bounds, best] == sorted([*bounds, best])
        assert bounds[0] <= bound_ns(instance) <= bounds[-1]


@pytest.mark.parametrize("kind", exhaustive.KINDS, ids=str)
def test_it_is_near_the_optimum(kind: Kind) -> None:
    draw = random.Random(kind.seed)
    for _ in range(5):
        instance = exhaustive.random_instance(draw, 7, kind)
        for in_flight in (1, 2):
            best = least_end_ns(instance, in_flight)
            assert best is not None
            assert best <= 1.35 * bound_ns(instance, in_flight=in_flight)


@some.many
@given(chains(), some.integer_curves(falls=True))
def test_no_planner_undercuts_it(profile: Profile, curve: some.IntegerCurve) -> None:
    known = terms(profile)
    bound = lower_bound_ns(known, curve.curve())
    network = curve.network(profile.workers)
    for planner in PLANNERS.values():
        plan = planner.plan(profile, network)
        period_ns = predict_iteration_s(profile, network, plan) * 1e9
        # Parts of odd costs, and shares of the update, are rounded to a nanosecond each.
        assert bound <= period_ns + len(plan.messages) + len(profile.operations), planner.NAME


@some.many
@given(chains(), some.integer_curves(falls=True), some.integer_curves(falls=True))
def test_no_plan_undercuts_that_of_a_network_with_two_curves(
    profile: Profile, alone: some.IntegerCurve, two: some.IntegerCurve
) -> None:
    network = alone.network(profile.workers, two)
    plans = [planner.plan(profile, network) for planner in PLANNERS.values()]
    plans += [plan_decoupled("x", profile, network, in_flight=n) for n in (1, 2)]
    for plan in plans:
        decoupled = any(message.collective != "all-reduce" for message in plan.messages)
        bound = network_bound_ns(terms(profile), network, decoupled=decoupled)
        period_ns = predict_iteration_s(profile, network, plan) * 1e9
        assert bound <= period_ns + 2 * len(plan.messages) + len(profile.operations), plan.planner


def test_it_is_exact_for_one_tensor() -> None:
    round_ = Terms([100], [50], [30], base_ns=120)
    curve = CostCurve.line(8e-9, 2e-9)
    assert lower_bound_ns(round_, curve, decoupled=False) == 100 + 8 + 2 * 50 + 30
    assert lower_bound_ns(round_._replace(base_ns=1000), curve) == 1000


def test_many_tensors_are_bounded() -> None:
    count = 40_000
    round_ = Terms(list(range(count)), [10] * count, [0] * count, base_ns=0)
    bound = lower_bound_ns(round_, CostCurve.line(5e-9, 1e-9), decoupled=False)
    assert 0.99 * 10 * count < bound <= 10 * count + 5


def test_a_dip_in_the_curve_of_single_messages_leaves_the_rate_of_the_link() -> None:
    """Messages of 139 KB take no longer than empty ones, but each of them pays for that."""
    # All-reduces between four emulated hosts at 2.5 Gbit/s, alone and two at a time.
    alone = [(0, 3.87e-3, 0.0), (1, 4.5e-3, 1.4e-8), (139_022, 3.87e-3, 1e-9)]
    alone += [(908_093, 6.3e-3, 4.5e-9), (3_632_373, 1.85e-2, 4.94e-9)]
    two = [
        (0, 0.0, 0.0),
        (1, 5.1e-3, 3.6e-9),
        (741_455, 5.9e-3, 4.67e-9),
        (8 << 20, 4.2e-2, 4.9e-9),
    ]
    network = Network(
        name="measured",
        workers=4,
        all_reduce=CostCurve.of_rows(alone),
        pipelined=CostCurve.of_rows(two),
    )
    round_ = Terms([0], [438_000_000], [0], base_ns=1_200_000_000)
    for decoupled in (False, True):
        bound = network_bound_ns(round_, network, decoupled=decoupled)
        assert bound > 438_000_000 * 4.7


@some.many
@given(some.integer_curves(falls=True), st.integers(1, 6000))
def test_the_rate_is_the_least_of_every_size(curve: some.IntegerCurve, total: int) -> None:
    latency = curve.cost_ns(0)
    least = min((curve.cost_ns(size) - latency) / size for size in range(1, total + 1))
    assert least_s_per_byte(curve.curve(), total) * 1e9 == pytest.approx(least, rel=1e-6, abs=1e-9)
