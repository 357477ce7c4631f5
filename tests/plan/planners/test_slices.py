"""TicTac, P3 and ByteScheduler: slices of tensors, by need. Plans by hand: test_by_hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.plan import Message
from syncline.plan.planners.bytescheduler import ByteScheduler
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.slices import (
    MOST_SLICES,
    Slice,
    most_urgent_first,
    slices,
    whole_tensors,
)
from syncline.plan.planners.tictac import TicTac
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s
from tests import strategies as some
from tests.plan.planners.instances import UNIT_LINE, chain, chains, iteration_s, period_ns, spans


@some.many
@given(chains(), some.integer_curves(), st.integers(1, 400), st.integers(1, 3))
def test_slices_by_need(profile: Profile, curve: some.IntegerCurve, size: int, credit: int) -> None:
    network = curve.network(2)
    ends = set(itertools.accumulate(g.elements for g in profile.gradients))
    for planner, most, in_flight in (
        (TicTac(), profile.gradient_bytes, 1),
        (P3(slice_elements=size), size, 1),
        (ByteScheduler(partition_elements=size, credit_elements=credit * size), size, credit),
    ):
        plan = planner.plan(profile, network)
        assert (plan.wait, plan.in_flight) == ("need", in_flight)
        assert ends <= {stop for _, stop in spans(plan)}  # no slice is of two tensors
        # A slice is smaller than the others only where its tensor ends.
        assert all(0 < stop - start <= most for start, stop in spans(plan))
        assert all(stop - start == most or stop in ends for start, stop in spans(plan))
        found_s = predict_iteration_s(profile, network, plan)
        if in_flight == 1:
            assert round(found_s * 1e9) == period_ns(profile, plan, curve.cost_ns)
        else:
            assert found_s >= profile.computation_s * (1 - 1e-9)


@some.many
@given(chains(), some.integer_curves())
def test_never_worse_than_ready_order(profile: Profile, curve: some.IntegerCurve) -> None:
    # Neither leaves the channel idle while something is ready, so the last arrival is the same; and
    # after it TicTac has at most the whole forward pass to go, as wfbp always has.
    network = curve.network(2)
    assert iteration_s(profile, network, TicTac()) <= iteration_s(profile, network, Wfbp())


def test_a_tensor_without_elements_goes_with_the_one_before() -> None:
    profile = chain([1, 1, 1, 1], [0, 3, 0, 2], [1, 1, 1, 1])
    found = [(s.start, s.stop, s.ready_ns / 1e9, s.need) for s in whole_tensors(profile)]
    assert found == [(0, 3, 3, 1), (3, 5, 4, 0)]


def test_sizes_of_several_dtypes_are_in_bytes() -> None:
    profile = chain([1, 0], [4, 4], [1, 1], ["float64", "float16"])
    plan = P3(slice_elements=3).plan(profile, UNIT_LINE)
    bytes_of = dict(zip(plan.messages, plan.message_bytes(), strict=True))
    assert bytes_of[Message(start=0, stop=3)] == 24
    assert bytes_of[Message(start=4, stop=7)] == 6


def test_every_slice_pays_the_latency_and_a_credit_hides_it() -> None:
    # Four messages of 1 s latency and 1 s transmission, all ready at 1: with two in flight the
    # second's latency overlaps the first's transmission, from then on every second.
    profile = chain([1], [4], [0])
    network = Network.line(workers=2, a_s=1, b_s_per_byte=1 / 4)
    one = ByteScheduler(partition_elements=1, credit_elements=1)
    two = ByteScheduler(partition_elements=1, credit_elements=2)
    assert iteration_s(profile, network, one) == 1 + 4 * 2
    # Latencies at 1, 1, 3, 4; transmissions 2-3, 3-4, 4-5, 5-6.
    assert iteration_s(profile, network, two) == 6


@pytest.mark.parametrize(
    ("partition", "credit", "in_flight"),
    [(8_000_000, 16_000_000, 2), (1_000_000, 4_000_000, 4), (3, 4, 2), (5, 4, 1), (1, 64, 64)],
)
def test_a_credit_lasts_for_whole_partitions(partition: int, credit: int, in_flight: int) -> None:
    planner = ByteScheduler(partition_elements=partition, credit_elements=credit)
    assert planner.in_flight == in_flight


def test_too_many_slices() -> None:
    profile = chain([1], [MOST_SLICES * 10], [1])
    assert len(slices(profile, 10, "p3")) == MOST_SLICES
    said = "p3: slices of 9 elements .* 145636 messages, at most 131072 .* at least 20 elements"
    with pytest.raises(UserError, match=said):
        P3(slice_elements=9).plan(profile, UNIT_LINE)


def one(size_bytes: int, ready_ns: int, need: int, tensor: int = 0) -> Slice:
    return Slice(0, 0, size_bytes, ready_ns, 0, need, tensor)


needs = st.integers(0, 4)
slices_of = st.lists(
    st.builds(one, st.integers(0, 3000), st.integers(0, 6000), needs, needs), min_size=1, max_size=9
)


def by_looking(slices: list[Slice], curve: some.IntegerCurve, in_flight: int) -> list[int]:
    """Return the indices in the order of sending, from the rules as stated."""
    left = list(range(len(slices)))
    begun: list[int] = []  # when the latency of each sent message began
    ended: list[int] = []
    order: list[int] = []
    while left:
        free = max([0, *begun[-1:]])
        if len(ended) >= in_flight:
            free = max(free, ended[-in_flight])
        moment = max(free, min(slices[i].ready_ns for i in left))
        ready = [i for i in left if slices[i].ready_ns <= moment]
        chosen = min(ready, key=lambda i: (slices[i].need, -slices[i].tensor, i))
        cost = curve.cost_ns(slices[chosen].size_bytes)
        latency = min(curve.cost_ns(0), cost)
        begun.append(moment)
        ended.append(max([moment + latency, *ended[-1:]]) + cost - latency)
        order.append(chosen)
        left.remove(chosen)
    return order


@some.many
@given(slices_of, some.integer_curves(), st.integers(1, 4))
def test_order_by_looking(slices: list[Slice], curve: some.IntegerCurve, in_flight: int) -> None:
    found = most_urgent_first(slices, curve.network(), in_flight=in_flight)
    assert found == [slices[index] for index in by_looking(slices, curve, in_flight)]


@pytest.mark.parametrize(("in_flight", "needs"), [(1, [2, 1, 3]), (2, [2, 3, 1])])
def test_two_in_flight_are_not_called_back(in_flight: int, needs: list[int]) -> None:
    network = Network.line(workers=2, a_s=0, b_s_per_byte=1e-9)
    slices = [one(10, 0, 2), one(10, 0, 3), one(10, 5, 1)]
    found = most_urgent_first(slices, network, in_flight=in_flight)
    assert [s.need for s in found] == needs
