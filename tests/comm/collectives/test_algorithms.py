"""What is particular to an algorithm, beside the papers' figures."""

from __future__ import annotations

import numpy as np
from reproduce.dependencies import dependencies
from reproduce.paper_costs import pipeline_steps

from syncline.comm.collectives import Schedule, Step, program
from tests.comm.collectives.programs import each
from tests.comm.collectives.proof import verify


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


@each((power,) for power in range(6))
def test_steps_on_powers_of_two(power: int) -> None:
    """MG-WFBP, Table 2: the factor of alpha."""
    ranks = 1 << power
    assert all_reduce("ring", ranks).steps == 2 * (ranks - 1)
    assert all_reduce("recursive-doubling", ranks).steps == power
    assert all_reduce("halving-doubling", ranks).steps == 2 * power
    assert all_reduce("binary-tree", ranks).steps == 2 * power


@each((ranks,) for ranks in (3, 5, 7, 12, 31))
def test_steps_on_other_numbers(ranks: int) -> None:
    power = ranks.bit_length() - 1
    assert all_reduce("recursive-doubling", ranks).steps == power + 2
    assert all_reduce("halving-doubling", ranks).steps == 2 * power + 2
    assert all_reduce("binary-tree", ranks).steps == 2 * (power + 1)


def test_the_surplus_goes_to_a_neighbour() -> None:
    assert all_reduce("recursive-doubling", 5).program(1) == [
        Step(0, "send", 0, 0, 1),
        Step(3, "copy", 0, 0, 1),
    ]
    assert [s.peer for s in all_reduce("recursive-doubling", 5).program(0)] == [1, 2, 2, 3, 3, 1]


def test_the_linear_pipeline_of_figure_2() -> None:
    """Three ranks and four blocks: a step less than Fig. 2c, whose last copies are not needed."""
    schedule = all_reduce("linear-pipeline", 3, blocks=4)
    assert schedule.steps == 8
    # Rank 0 sends a, b, c, d and then, as in the figure, the sum of a in the fifth step.
    sends = [(s.step, s.block_start) for s in schedule.program(0) if s.action == "send"]
    assert sends == [(step, step % 4) for step in range(8)]
    assert [s.step for s in schedule.program(0) if s.action == "copy"] == [2, 3, 4, 5]
    assert {s.peer for s in schedule.program(0) if s.action == "send"} == {1}


@each((ranks, blocks) for ranks in (2, 3, 4, 17, 64) for blocks in (1, 2, 3, 17, 100))
def test_the_steps_of_the_cost_formula(ranks: int, blocks: int) -> None:
    adding, passing = pipeline_steps("all-reduce", ranks, blocks)
    assert all_reduce("linear-pipeline", ranks, blocks=blocks).steps == adding + passing


@each((ranks,) for ranks in (2, 3, 4, 5, 8, 17, 64, 100))
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


def test_the_double_trees_use_every_port_in_every_step() -> None:
    """2 steps a block and a fill that does not depend on the blocks: no port idles in between."""
    for ranks in (8, 17, 64):
        steps = [
            all_reduce("double-binary-trees", ranks, blocks=blocks).steps
            for blocks in (64, 128, 256)
        ]
        assert steps[1] - steps[0] == 128
        assert steps[2] - steps[1] == 256


@each((ranks,) for ranks in (2, 3, 4, 5, 8, 17, 64, 100))
def test_the_double_trees_with_a_root_of_their_own(ranks: int) -> None:
    """The root sends each block once; every other rank has at most two children in both trees."""
    schedule = program("broadcast", "double-binary-trees", ranks, blocks=2)
    assert (np.bincount(schedule.destination, minlength=ranks) == [0] + [2] * (ranks - 1)).all()
    sent = np.bincount(schedule.source, minlength=ranks)
    assert sent[0] == 2
    assert sent.max() == 2
    steps = [
        program(collective, "double-binary-trees", ranks, blocks=blocks).steps
        for collective in ("broadcast", "reduce")
        for blocks in (64, 128)
    ]
    assert np.diff(steps)[::2].tolist() == [64, 64]
    assert max(steps) <= 128 + 4 * np.log2(ranks) + 4


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


def test_a_root_moves_everyone_on() -> None:
    moved = program("reduce", "linear-pipeline", 4, blocks=1, root=2)
    assert moved.root == 2
    assert moved.source.tolist() == [3, 0, 1]
    assert moved.destination.tolist() == [0, 1, 2]


@each(
    [
        ("binary-tree", "((0+1)+(2+3))+(4+5)"),
        ("recursive-doubling", "((0+1)+(2+3))+(4+5)"),
        ("halving-doubling", "((0+1)+4)+((2+3)+5)"),
        ("ring", "0+((((1+2)+3)+4)+5)"),
        ("direct", "((((0+1)+2)+3)+4)+5"),
        ("linear-pipeline", "((((0+1)+2)+3)+4)+5"),
        ("double-binary-trees", "0+(((1+2)+3)+(4+5))"),
    ]
)
def test_the_order_of_sums_of_six(algorithm: str, order: str) -> None:
    blocks = 2 if algorithm in ("linear-pipeline", "double-binary-trees") else None
    assert verify(all_reduce(algorithm, 6, blocks=blocks)).order(0) == order
