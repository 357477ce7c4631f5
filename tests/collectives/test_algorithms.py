"""What is particular to an algorithm, beside the papers' figures."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.collectives import (
    Step,
    binary_tree,
    double_binary_trees,
    halving_doubling,
    linear_pipeline,
    recursive_doubling,
    ring,
)
from syncline.model.pipeline_costs import pipeline_steps


def test_the_ring_of_two_by_hand() -> None:
    assert ring(2).program(0) == [
        Step(0, "send", 1, 0, 1),
        Step(0, "reduce", 1, 1, 2),
        Step(1, "send", 1, 1, 2),
        Step(1, "copy", 1, 0, 1),
    ]


def test_halving_doubling_of_four_by_hand() -> None:
    assert halving_doubling(4).program(1) == [
        Step(0, "send", 3, 2, 4),
        Step(0, "reduce", 3, 0, 2),
        Step(1, "send", 0, 0, 1),
        Step(1, "reduce", 0, 1, 2),
        Step(2, "send", 0, 1, 2),
        Step(2, "copy", 0, 0, 1),
        Step(3, "send", 3, 0, 2),
        Step(3, "copy", 3, 2, 4),
    ]


@pytest.mark.parametrize("power", range(6))
def test_steps_on_powers_of_two(power: int) -> None:
    """MG-WFBP, Table 2: the factor of alpha."""
    ranks = 1 << power
    assert ring(ranks).steps == 2 * (ranks - 1)
    assert recursive_doubling(ranks).steps == power
    assert halving_doubling(ranks).steps == 2 * power
    assert binary_tree(ranks).steps == 2 * power


@pytest.mark.parametrize("ranks", [3, 5, 7, 12, 31])
def test_steps_on_other_numbers(ranks: int) -> None:
    power = ranks.bit_length() - 1
    assert recursive_doubling(ranks).steps == power + 2
    assert halving_doubling(ranks).steps == 2 * power + 2
    assert binary_tree(ranks).steps == 2 * (power + 1)


def test_the_surplus_goes_to_a_neighbour() -> None:
    assert recursive_doubling(5).program(1) == [Step(0, "send", 0, 0, 1), Step(3, "copy", 0, 0, 1)]
    assert [s.peer for s in recursive_doubling(5).program(0)] == [1, 2, 2, 3, 3, 1]


def test_the_linear_pipeline_of_figure_2() -> None:
    """Three ranks and four blocks: a step less than Fig. 2c, whose last copies are not needed."""
    schedule = linear_pipeline(3, blocks=4)
    assert schedule.steps == 8
    # Rank 0 sends a, b, c, d and then, as in the figure, the sum of a in the fifth step.
    sends = [(s.step, s.block_start) for s in schedule.program(0) if s.action == "send"]
    assert sends == [(step, step % 4) for step in range(8)]
    assert [s.step for s in schedule.program(0) if s.action == "copy"] == [2, 3, 4, 5]
    assert {s.peer for s in schedule.program(0) if s.action == "send"} == {1}


@pytest.mark.parametrize("ranks", [2, 3, 4, 17, 64])
@pytest.mark.parametrize("blocks", [1, 2, 3, 17, 100])
def test_the_steps_of_the_cost_formula(ranks: int, blocks: int) -> None:
    adding, passing = pipeline_steps("all-reduce", ranks, blocks)
    assert linear_pipeline(ranks, blocks=blocks).steps == adding + passing


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 17, 64, 100])
def test_the_double_trees(ranks: int) -> None:
    """A rank that has children in one tree is a leaf in the other; depth is logarithmic."""
    schedule = double_binary_trees(ranks, blocks=2)
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
        steps = [double_binary_trees(ranks, blocks=blocks).steps for blocks in (64, 128, 256)]
        assert steps[1] - steps[0] == 128
        assert steps[2] - steps[1] == 256
