"""PACE: the fusion against the published recursion, the pieces, and what both promise."""

from __future__ import annotations

import functools
import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import _native
from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.planners.pace import MOST_TENSORS, Pace, preemptive_order
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.bound import terms
from syncline.plan.simulator.predict import predict
from tests import strategies as some
from tests.plan.planners.instances import chain, chains, iteration_s


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
    """PACE, Algorithm 1, lines 1 to 10, with every R tried."""
    best_end: float = float("inf")
    best: list[int] = []
    for groups in range(1, len(sizes) + 1):  # line 3
        _, last = max_min_size(tuple(sizes), groups)  # line 4
        end = max(base, end_of(ready, sizes, tails, last, curve))  # lines 5 and 6
        if end < best_end:  # line 7
            best_end, best = end, last
    return best


@st.composite
def sized_chains(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    count = draw(st.integers(1, 8))

    def values(low: int, high: int) -> list[int]:
        number = st.one_of(st.integers(low, high), st.integers(low, low + 3))
        return draw(st.lists(number, min_size=count, max_size=count))

    return sorted(values(0, 5000)), values(1, 3000), values(0, 5000)


@some.many
@given(sized_chains(), st.integers(0, 9000), some.integer_curves())
def test_the_fusion_is_that_of_algorithm_1(
    instance: tuple[list[int], list[int], list[int]], base: int, curve: some.IntegerCurve
) -> None:
    ready, sizes, tails = instance
    found = _native.fuse_balanced(ready, sizes, tails, base, curve.curve().rows())
    assert found == algorithm_1(ready, sizes, tails, base, curve)


@pytest.mark.parametrize("seed", range(5))
def test_of_equals_the_fewest_groups_win(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        sizes = [draw.randint(1, 30) for _ in range(draw.randint(1, 9))]
        ready = sorted(draw.randint(0, 60) for _ in sizes)
        tails = [draw.randint(0, 200) for _ in sizes]
        curve = some.IntegerCurve(((0, draw.randint(0, 20), draw.randint(0, 2)),))
        found = _native.fuse_balanced(ready, sizes, tails, 0, curve.curve().rows())
        published = [max_min_size(tuple(sizes), r)[1] for r in range(1, len(sizes) + 1)]
        ends = [end_of(ready, sizes, tails, last, curve) for last in published]
        assert found == published[ends.index(min(ends))]


def test_figure_2() -> None:
    profile = chain(backward_s=[1, 1, 1], elements=[4, 2, 1], forward_s=[2, 1, 1])
    network = Network.line(workers=2, a_s=0, b_s_per_byte=1 / 4)  # 1 s an element
    assert terms(profile).ready_ns == [1_000_000_000, 2_000_000_000, 3_000_000_000]
    assert terms(profile).tail_ns == [1_000_000_000, 2_000_000_000, 4_000_000_000]
    plan = Pace().plan(profile, network)
    assert [(m.start, m.stop) for m in plan.messages] == [(0, 1), (4, 5), (6, 7), (5, 6), (1, 4)]
    assert (plan.wait, plan.in_flight) == ("need", 1)
    # FIFO takes 12: PACE's "25% reduction of DAG execution time".
    assert predict(profile, network, plan).prediction.iteration_s == 9
    assert iteration_s(profile, network, Wfbp()) == 12


def test_pieces_end_between_elements() -> None:
    # 2.5 s of 10 s are sent before the second tensor interrupts: 2.5 of 10 elements, so 2.
    profile = chain(backward_s=[1, 2.5], elements=[10, 1], forward_s=[5, 1])
    network = Network.line(workers=2, a_s=0, b_s_per_byte=1 / 4)
    plan = Pace().plan(profile, network)
    assert [(m.start, m.stop) for m in plan.messages] == [(0, 2), (10, 11), (2, 10)]


def test_a_piece_of_less_than_an_element_goes_with_the_next() -> None:
    profile = chain(backward_s=[1, 0.5], elements=[10, 1], forward_s=[5, 1])
    network = Network.line(workers=2, a_s=0, b_s_per_byte=1 / 4)
    plan = Pace().plan(profile, network)
    assert [(m.start, m.stop) for m in plan.messages] == [(10, 11), (0, 10)]


def test_a_long_latency_fuses_everything() -> None:
    profile = chain(backward_s=[1, 1, 1], elements=[4, 2, 1], forward_s=[2, 1, 1])
    network = Network.line(workers=2, a_s=100, b_s_per_byte=1e-9)
    assert len(Pace().groups(profile, network)) == 1
    assert len(Pace().plan(profile, network).messages) == 1


def test_groups_of_several_dtypes() -> None:
    profile = chain(
        backward_s=[1, 1],
        elements=[3, 5],
        forward_s=[1, 1],
        dtypes=["float64", "bfloat16"],
    )
    network = Network.line(workers=2, a_s=100, b_s_per_byte=1e-9)
    (group,) = Pace().groups(profile, network)
    assert (group.start, group.stop, group.size_bytes) == (0, 8, 34)


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
def test_without_latencies_the_simulator_finds_what_pace_expects(
    profile: Profile, ns_per_byte: int
) -> None:
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


def test_a_latency_that_pace_does_not_see() -> None:
    # Three groups in five pieces: with 0.1 s a piece, PACE expects 0.3 s of latencies and pays 0.5.
    profile = chain(backward_s=[1, 1, 1], elements=[40, 20, 10], forward_s=[2, 1, 1])
    network = Network.line(workers=2, a_s=0.1, b_s_per_byte=1 / 40)
    groups = Pace().groups(profile, network)
    pieces = Pace().plan(profile, network).messages
    assert len(pieces) > len(groups) == 3
    expected_ns, _ = preemptive_order(
        [g.ready_ns for g in groups],
        [round((0.1 + g.size_bytes / 40) * 1e9) for g in groups],
        [g.tail_ns for g in groups],
    )
    assert iteration_s(profile, network, Pace()) > expected_ns / 1e9


def test_too_many_tensors() -> None:
    count = MOST_TENSORS + 1
    profile = Profile(
        model="deep",
        device="cpu",
        workers=1,
        iterations=1,
        operations=(Operation(name="b", phase="backward", duration_s=1),),
        gradients=tuple(Gradient(name=f"g{i}", elements=1, ready_after=0) for i in range(count)),
    )
    network = Network.line(workers=2, a_s=0, b_s_per_byte=1e-9)
    with pytest.raises(UserError, match="'deep' has 16385 gradient tensors; at most 16384"):
        Pace().plan(profile, network)
    fewer = msgspec.structs.replace(profile, gradients=profile.gradients[:100])
    assert Pace().plan(fewer, network).messages


def test_what_is_no_chain() -> None:
    rows = [(0, 0.0, 1e-9)]
    with pytest.raises(ValueError, match="sizes must be positive"):
        _native.fuse_balanced([0, 0], [1, 0], [0, 0], 0, rows)
    with pytest.raises(ValueError, match="ready times not decrease"):
        _native.fuse_balanced([1, 0], [1, 1], [0, 0], 0, rows)
    with pytest.raises(ValueError, match="as many sizes and tails"):
        _native.fuse_balanced([1, 2], [1], [0], 0, rows)
    with pytest.raises(ValueError, match="more than 64 bits"):
        _native.fuse_balanced([1, 2], [1 << 62, 1 << 62], [0, 0], 0, rows)
    assert _native.fuse_balanced([], [], [], 0, rows) == []
    assert _native.fuse_balanced([0], [0], [0], 0, rows) == [0]
