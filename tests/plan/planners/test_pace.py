"""PACE: the fusion against the published recursion, the pieces, and what both promise."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import _native
from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.planners.pace import MOST_TENSORS, Pace, preemptive_order
from syncline.plan.profile import Profile
from syncline.plan.simulator.bound import terms
from tests import strategies as some
from tests.plan.planners.instances import chain, chains, iteration_s

Instance = tuple[list[int], list[int], list[int]]  # ready times, sizes and tails


def max_min_size(sizes: tuple[int, ...], groups: int) -> tuple[float, list[int]]:
    """PACE, Algorithm 1, lines 11 to 23: the smallest size and the sizes of the groups' tensors."""

    @functools.cache
    def solve(first: int, r: int) -> tuple[float, tuple[int, ...]]:
        rest = sizes[first:]
        if r == 1:  # line 12
            return sum(rest), (len(rest),)
        if r > len(rest):  # line 14
            return float("-inf"), ()
        maxmin_size, best_groups = 0.0, ()  # line 16
        for taken in range(1, len(rest) + 1):  # line 17: prefixes, the shortest first
            t_size, t_groups = solve(first + taken, r - 1)  # line 18
            temp_size = min(sum(rest[:taken]), t_size)  # line 19
            if maxmin_size < temp_size:  # line 20
                maxmin_size = temp_size
                best_groups = (taken, *t_groups)
        return maxmin_size, best_groups

    size, counts = solve(0, groups)
    return size, [last - 1 for last in itertools.accumulate(counts)]


def end_of(
    ready: list[int], sizes: list[int], tails: list[int], last: list[int], curve: some.IntegerCurve
) -> int:
    """Return max(arrival + tail) of groups in the preemptive order."""
    bounds = list(itertools.pairwise([0, *(index + 1 for index in last)]))
    return preemptive_order(
        [ready[b - 1] for _, b in bounds],
        [curve.cost_ns(sum(sizes[a:b])) for a, b in bounds],
        [max(tails[a:b]) for a, b in bounds],
    )[0]


def algorithm_1(
    ready: list[int], sizes: list[int], tails: list[int], base: int, curve: some.IntegerCurve
) -> list[int]:
    """PACE, Algorithm 1, lines 1 to 10, with every R tried: of equals, the fewest groups."""
    best_end: float = float("inf")
    best: list[int] = []
    for groups in range(1, len(sizes) + 1):  # line 3
        _, last = max_min_size(tuple(sizes), groups)  # line 4
        end = max(base, end_of(ready, sizes, tails, last, curve))  # lines 5 and 6
        if end < best_end:  # line 7
            best_end, best = end, last
    return best


@st.composite
def sized_chains(draw: st.DrawFn) -> Instance:
    count = draw(st.integers(1, 9))
    most = draw(st.sampled_from([60, 5000]))  # with small numbers, many ways are equal

    def values(low: int, high: int) -> list[int]:
        number = st.one_of(st.integers(low, high), st.integers(low, low + 3))
        return draw(st.lists(number, min_size=count, max_size=count))

    return sorted(values(0, most)), values(1, most // 2), values(0, most)


@some.many
@given(
    sized_chains(),
    st.integers(0, 9000) | st.just(0),
    some.integer_curves() | some.integer_curves(max_latency_ns=20, max_segments=1),
)
def test_fusion_is_algorithm_1(instance: Instance, base: int, curve: some.IntegerCurve) -> None:
    ready, sizes, tails = instance
    found = _native.fuse_balanced(ready, sizes, tails, base, curve.curve().rows())
    assert found == algorithm_1(ready, sizes, tails, base, curve)


def test_a_long_latency_fuses_everything() -> None:
    dtypes = ["float64", "bfloat16"]
    profile = chain([1, 1], [3, 5], [1, 1], dtypes)
    network = Network.line(workers=2, a_s=100, b_s_per_byte=1e-9)
    (group,) = Pace().groups(profile, network)
    assert (group.start, group.stop, group.size_bytes) == (0, 8, 34)
    assert len(Pace()._arrange(profile, network).messages) == 1
    assert len(Pace().plan(profile, network).messages) == 2  # one for each dtype


@some.many
@given(some.layer_profiles(max_layers=12), some.integer_curves())
def test_groups_and_pieces_of_random_chains(profile: Profile, curve: some.IntegerCurve) -> None:
    network = curve.network()
    groups = Pace().groups(profile, network)
    assert groups[0].start == 0
    assert groups[-1].stop == sum(g.elements for g in profile.gradients)
    assert all(a.stop == b.start for a, b in itertools.pairwise(groups))
    plan = Pace().plan(profile, network)
    assert len(plan.messages) < 2 * len(groups)
    for message in plan.messages:  # a piece is of one group
        assert any(g.start <= message.start <= message.stop <= g.stop for g in groups)


@some.many
@given(chains(), st.integers(0, 20))
def test_without_latencies_pace_is_right(profile: Profile, ns_per_byte: int) -> None:
    network = some.IntegerCurve(((0, 0, ns_per_byte),)).network(2)
    groups = Pace().groups(profile, network)
    end_ns, pieces = preemptive_order(
        [g.ready_ns for g in groups],
        [g.size_bytes * ns_per_byte for g in groups],
        [g.tail_ns for g in groups],
    )
    expected = max(end_ns, terms(profile).base_ns)
    interruptions = len(pieces) - len(groups)
    found = round(iteration_s(profile, network, Pace()) * 1e9)
    # A piece ends between two elements, so each interruption idles for less than one at most. Of a
    # group that was interrupted some tensors may arrive, and be used, before the whole.
    assert found <= expected + interruptions * 4 * ns_per_byte
    if not interruptions:
        assert found == expected


def test_too_many_tensors() -> None:
    count = MOST_TENSORS + 1
    profile = some.profile_of([0] * count, [1] * count)
    with pytest.raises(UserError, match="'random' has 16385 gradient tensors; at most 16384"):
        Pace().plan(profile, Network.line(workers=2, a_s=0, b_s_per_byte=1e-9))


ROWS = [(0, 0.0, 1e-9)]


@pytest.mark.parametrize(
    ("ready", "sizes", "tails", "said"),
    [
        ([0, 0], [1, 0], [0, 0], "sizes must be positive"),
        ([1, 0], [1, 1], [0, 0], "ready times not decrease"),
        ([1, 2], [1], [0], "as many sizes and tails"),
        ([1, 2], [1 << 62, 1 << 62], [0, 0], "more than 64 bits"),
    ],
)
def test_what_is_no_chain(ready: list[int], sizes: list[int], tails: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _native.fuse_balanced(ready, sizes, tails, 0, ROWS)


def test_the_smallest_chains() -> None:
    assert _native.fuse_balanced([], [], [], 0, ROWS) == []
    assert _native.fuse_balanced([0], [0], [0], 0, ROWS) == [0]
