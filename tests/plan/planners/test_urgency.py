"""The priority queue against one that looks at every message each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.network import Network
from syncline.plan.planners.slices import Slice, most_urgent_first
from tests import strategies as some

slices_of = st.lists(
    st.builds(
        Slice,
        start=st.just(0),
        stop=st.just(0),
        size_bytes=st.integers(0, 3000),
        ready_ns=st.integers(0, 6000),
        tail_ns=st.just(0),
        need=st.integers(0, 4),
        tensor=st.integers(0, 4),
    ),
    min_size=1,
    max_size=9,
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
def test_the_order_is_that_of_the_rule(
    slices: list[Slice], curve: some.IntegerCurve, in_flight: int
) -> None:
    found = most_urgent_first(slices, curve.network(), in_flight=in_flight)
    expected = by_looking(slices, curve, in_flight)
    assert found == [slices[index] for index in expected]


def one(ready_ns: int, size_bytes: int, need: int) -> Slice:
    return Slice(0, 0, size_bytes, ready_ns, 0, need, 0)


def test_with_two_in_flight_a_second_is_handed_over_before_an_urgent_one_is_ready() -> None:
    network = Network.line(workers=2, a_s=0, b_s_per_byte=1e-9)
    slices = [one(0, 10, 2), one(0, 10, 3), one(5, 10, 1)]
    needs = [s.need for s in most_urgent_first(slices, network)]
    assert needs == [2, 1, 3]
    needs = [s.need for s in most_urgent_first(slices, network, in_flight=2)]
    assert needs == [2, 3, 1]
