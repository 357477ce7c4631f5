"""Plans whose updates wait for a norm: against the simulator, the bound, and exhaustive search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from syncline.model.network import Network
from syncline.model.profile import Profile
from syncline.planners import PLANNERS
from syncline.planners.dear import Dear
from syncline.planners.halves import Halves, Order, plan_in_halves
from syncline.planners.merge import Merge
from syncline.planners.overlap import Overlap
from syncline.planners.slices import Slice, plan_of, whole_tensors
from syncline.simulator.bound import network_bound_ns, terms
from syncline.simulator.predict import predict_iteration_s
from tests.planners.instances import chain, chains


def line(startup_ns: int, ns_per_byte: int) -> Network:
    return Network.line(workers=2, a_s=startup_ns / 1e9, b_s_per_byte=ns_per_byte / 1e9)


def with_norm(profile: Profile) -> Profile:
    return msgspec.structs.replace(profile, norm="2")


networks = st.builds(line, st.integers(0, 2000), st.integers(0, 20))
flights = pytest.mark.parametrize("in_flight", [1, 2])


@flights
@given(profile=chains(), network=networks)
def test_the_model_is_the_simulators(profile: Profile, network: Network, in_flight: int) -> None:
    profile = with_norm(profile)
    groups = [t for t in whole_tensors(profile) if t.size_bytes]
    halves = Halves(groups, network, len(profile.gradients), in_flight)
    for fill in (False, True):
        order = halves.greedy(fill=fill)
        messages = halves.messages(order)
        plan = plan_of("x", profile, 2, messages, in_flight=in_flight)
        expected_ns = max(terms(profile).base_ns, halves.end_ns(order))
        found_ns = predict_iteration_s(profile, network, plan) * 1e9
        if any(m.collective == "all-reduce" for m in messages):  # it pays one startup, not two
            assert found_ns <= expected_ns + len(messages)
        else:
            assert found_ns == pytest.approx(expected_ns, abs=len(messages))


@flights
@given(profile=chains(), network=networks)
def test_none_ends_before_the_bound(profile: Profile, network: Network, in_flight: int) -> None:
    profile = with_norm(profile)
    bound_ns = network_bound_ns(terms(profile), network, halves=True, norm=True)
    for plan in (
        plan_in_halves("x", profile, network, in_flight=in_flight),
        Dear().plan(profile, network),
        msgspec.structs.replace(Merge().plan(profile, network), wait="need", norm="2"),
    ):
        slack_ns = 2 * len(plan.messages)  # the simulator rounds every message
        assert predict_iteration_s(profile, network, plan) * 1e9 >= bound_ns - slack_ns


@given(profile=chains(), network=networks)
def test_no_planner_is_better_under_the_constraint(profile: Profile, network: Network) -> None:
    profile = with_norm(profile)
    own = predict_iteration_s(profile, network, Overlap().plan(profile, network))
    for name in PLANNERS:
        plan = PLANNERS[name].plan(profile, network)
        assert plan.norm == ("2" if plan.wait == "need" else None)
        assert own <= predict_iteration_s(profile, network, plan) + 1e-12, name


def every_order(groups: int) -> Iterator[Order]:
    """Yield every order of sending, sums in ready order, gathers of neighbours merged or not."""
    for cuts in itertools.product((False, True), repeat=groups - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), groups]
        gathers = [(a, b - 1, True) for a, b in itertools.pairwise(bounds)]
        for permuted in itertools.permutations(gathers):
            for places in itertools.combinations(range(groups + len(gathers)), groups):
                rest = iter(permuted)
                sums = iter((g, g, False) for g in range(groups))
                order: Order = [
                    next(sums) if at in places else next(rest)
                    for at in range(groups + len(gathers))
                ]
                summed: set[int] = set()
                for first, last, gathered in order:
                    if not gathered:
                        summed.add(first)
                    elif not summed.issuperset(range(first, last + 1)):
                        break
                else:
                    yield order


def every_grouping(tensors: list[Slice]) -> Iterator[list[Slice]]:
    for cuts in itertools.product((False, True), repeat=len(tensors) - 1):
        groups = [tensors[0]]
        for tensor, cut in zip(tensors[1:], cuts, strict=True):
            if cut:
                groups.append(tensor)
            else:
                groups[-1] = groups[-1].joined(tensor)
        yield groups


@flights
@settings(max_examples=30)
@given(profile=chains(max_layers=3), network=networks)
def test_it_is_near_the_best_of_all(profile: Profile, network: Network, in_flight: int) -> None:
    """Of all orders of all groups of whole tensors."""
    profile = with_norm(profile)
    tensors = [t for t in whole_tensors(profile) if t.size_bytes]
    assume(len(tensors) == len(profile.gradients))
    best_ns = min(
        halves.end_ns(order)
        for groups in every_grouping(tensors)
        for halves in [Halves(groups, network, len(profile.gradients), in_flight)]
        for order in every_order(len(groups))
    )
    best_ns = max(best_ns, terms(profile).base_ns)
    plan = plan_in_halves("x", profile, network, in_flight=in_flight)
    found_ns = predict_iteration_s(profile, network, plan) * 1e9
    assert found_ns <= 1.02 * best_ns + 6


def test_gathers_wait_for_the_sums_by_hand() -> None:
    """Two layers; half an all-reduce of each takes 100, and the channel is never idle."""
    profile = with_norm(
        chain(backward_s=[100e-9, 100e-9], elements=[25, 25], forward_s=[100e-9, 100e-9])
    )
    plan = plan_in_halves("x", profile, line(0, 2), in_flight=1)
    assert [(m.start, m.collective) for m in plan.messages] == [
        (0, "reduce-scatter"),
        (25, "reduce-scatter"),
        (25, "all-gather"),
        (0, "all-gather"),
    ]
