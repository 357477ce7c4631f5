"""What is particular to an algorithm, beside the papers' figures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduce.dependencies import dependencies

from syncline.comm.collectives import Collective, Schedule, Step, hierarchical, program
from syncline.errors import UserError
from tests.comm.collectives.programs import each, make
from tests.comm.collectives.proof import verify

RANKS = (2, 3, 4, 5, 8, 17, 64, 100)


def all_reduce(algorithm: str, ranks: int, *, blocks: int | None = None) -> Schedule:
    return program("all-reduce", algorithm, ranks, blocks=blocks)


def test_the_ring_of_two_by_hand() -> None:
    assert all_reduce("ring", 2).program(0) == [
        Step(0, "send", 1, 1, 2),
        Step(0, "reduce", 1, 0, 1),
        Step(1, "send", 1, 0, 1),
        Step(1, "copy", 1, 1, 2),
    ]


def test_halving_doubling_of_four_by_hand() -> None:
    assert all_reduce("halving-doubling", 4).program(1) == [
        Step(0, "send", 3, 2, 4),
        Step(0, "reduce", 3, 0, 2),
        Step(1, "send", 0, 0, 1),
        Step(1, "reduce", 0, 1, 2),
        Step(2, "send", 0, 1, 2),
        Step(2, "copy", 0, 0, 1),
        Step(3, "send", 3, 0, 2),
        Step(3, "copy", 3, 2, 4),
    ]


def test_the_surplus_goes_to_a_neighbour() -> None:
    schedule = all_reduce("recursive-doubling", 5)
    assert schedule.program(1) == [Step(0, "send", 0, 0, 1), Step(3, "copy", 0, 0, 1)]
    assert [s.peer for s in schedule.program(0)] == [1, 2, 2, 3, 3, 1]


def test_the_linear_pipeline_of_figure_2() -> None:
    """Three ranks and four blocks: a step less than Fig. 2c, whose last copies are not needed."""
    schedule = all_reduce("linear-pipeline", 3, blocks=4)
    assert schedule.steps == 8
    # Rank 0 sends a, b, c, d and then, as in the figure, the sum of a in the fifth step.
    sends = [(s.step, s.block_start) for s in schedule.program(0) if s.action == "send"]
    assert sends == [(step, step % 4) for step in range(8)]
    assert [s.step for s in schedule.program(0) if s.action == "copy"] == [2, 3, 4, 5]
    assert {s.peer for s in schedule.program(0) if s.action == "send"} == {1}


@each((ranks,) for ranks in RANKS)
def test_the_double_trees(ranks: int) -> None:
    """A rank that has children in one tree is a leaf in the other; depth is logarithmic."""
    schedule = all_reduce("double-binary-trees", ranks, blocks=2)
    children = np.zeros((2, ranks), dtype=int)
    for row in np.flatnonzero(schedule.reduces):
        children[schedule.block_start[row], schedule.destination[row]] += 1
    assert children.sum(axis=1).tolist() == [ranks - 1, ranks - 1]
    assert children.sum(axis=0).max() <= 2
    assert schedule.steps <= 8 * np.log2(ranks) + 4
    if ranks % 2 == 0:
        assert (children.min(axis=0) == 0).all()


@each((ranks,) for ranks in RANKS)
def test_the_double_trees_with_a_root_of_their_own(ranks: int) -> None:
    """The root sends each block once; every other rank has at most two children in both trees."""
    schedule = program("broadcast", "double-binary-trees", ranks, blocks=2)
    assert (np.bincount(schedule.destination, minlength=ranks) == [0] + [2] * (ranks - 1)).all()
    sent = np.bincount(schedule.source, minlength=ranks)
    assert sent[0] == 2
    assert sent.max() == 2


@each(itertools.product(("broadcast", "reduce", "all-reduce"), RANKS))
def test_the_double_trees_use_every_port_in_every_step(collective: Collective, ranks: int) -> None:
    """A step a block and way, and a fill that does not depend on the blocks: no port idles."""
    short, long = (
        program(collective, "double-binary-trees", ranks, blocks=blocks).steps
        for blocks in (64, 128)
    )
    ways = 2 if collective == "all-reduce" and ranks > 2 else 1
    assert long - short == 64 * ways
    assert long <= ways * (128 + 4 * np.log2(ranks)) + 4


def test_broadcast_down_a_tree_by_hand() -> None:
    schedule = program("broadcast", "minimum-spanning-tree", 6)
    hops = list(zip(schedule.step, schedule.source, schedule.destination, strict=True))
    assert hops == [(0, 0, 4), (1, 0, 2), (2, 0, 1), (2, 2, 3), (2, 4, 5)]


def test_scatter_sends_what_is_below() -> None:
    """Six ranks: the root sends the far third, then each half of what is left."""
    schedule = program("broadcast", "scatter-ring", 6)
    assert schedule.steps == 3 + 5
    assert schedule.program(0)[:4] == [
        Step(0, "send", 4, 4, 6),
        Step(1, "send", 2, 2, 4),
        Step(2, "send", 1, 1, 2),
        Step(3, "send", 1, 0, 1),
    ]
    assert schedule.program(4)[0] == Step(0, "copy", 0, 4, 6)


@each([("recursive-halving",), ("ring",), ("direct",)])
def test_a_reduce_scatter_and_an_all_gather_send_as_much(algorithm: str) -> None:
    gather = "recursive-doubling" if algorithm == "recursive-halving" else algorithm
    for ranks in (2, 6, 8, 13):
        halves = [program("reduce-scatter", algorithm, ranks), program("all-gather", gather, ranks)]
        sent = [(half.block_stop - half.block_start).sum() for half in halves]
        assert sent[0] == sent[1]
        assert halves[0].reduces.any()
        assert not halves[1].reduces.any()


def test_no_direct_transfer_of_a_half_waits_for_another() -> None:
    """All of them send what was there at the start, so in shared memory all may run at once."""
    for collective in ("reduce-scatter", "all-gather", "broadcast"):
        schedule = program(collective, "direct", 7)
        assert len(dependencies(schedule).send_after_result.later) == 0
        assert len(dependencies(program("all-reduce", "direct", 7)).send_after_result.later) == 42


@each(
    [
        ("all-reduce", "binary-tree", "((0+1)+(2+3))+(4+5)"),
        ("all-reduce", "recursive-doubling", "((0+1)+(2+3))+(4+5)"),
        ("all-reduce", "halving-doubling", "((0+1)+4)+((2+3)+5)"),
        ("all-reduce", "ring", "0+((((1+2)+3)+4)+5)"),
        ("all-reduce", "direct", "((((0+1)+2)+3)+4)+5"),
        ("all-reduce", "linear-pipeline", "((((0+1)+2)+3)+4)+5"),
        ("all-reduce", "double-binary-trees", "0+(((1+2)+3)+(4+5))"),
    ]
)
def test_the_order_of_sums_of_six(collective: Collective, algorithm: str, order: str) -> None:
    assert verify(make(collective, algorithm, 6, blocks=2)).order(0) == order


def test_the_order_of_halving() -> None:
    assert verify(program("reduce-scatter", "recursive-halving", 4)).order(0) == "(0+2)+(1+3)"


def placed(sizes: list[int]) -> list[list[int]]:
    numbers = itertools.count()
    return [[next(numbers) for _ in range(size)] for size in sizes]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms())
def test_any_hosts_are_summed_right_and_alike(sizes: list[int], random) -> None:
    ranks = list(range(sum(sizes)))
    random.shuffle(ranks)
    hosts = [[ranks[place] for place in host] for host in placed(sizes)]
    verified = verify(hierarchical(hosts), window=1)
    assert verified.identical


def test_between_hosts_every_byte_goes_as_in_a_ring_of_hosts() -> None:
    hosts = placed([4, 4, 4])
    schedule = hierarchical(hosts)
    host_of = np.repeat(np.arange(3), 4)
    between = host_of[schedule.source] != host_of[schedule.destination]
    blocks = (schedule.block_stop - schedule.block_start)[between]
    sent = np.bincount(host_of[schedule.source[between]], weights=blocks) / schedule.blocks
    assert sent == pytest.approx([2 * 2 / 3] * 3)


def test_one_rank_a_host_is_a_ring() -> None:
    assert hierarchical([[0], [1], [2]]).steps == 4


@pytest.mark.parametrize("hosts", [[], [[0], []], [[0, 1], [1]], [[0], [2]]])
def test_hosts_that_cannot_be(hosts: list[list[int]]) -> None:
    with pytest.raises(UserError, match="every rank from 0 on exactly once"):
        hierarchical(hosts)
