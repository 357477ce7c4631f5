"""What a program is made of; and checks of its rows, which say where they are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.comm.collectives import Schedule, Step, program
from syncline.comm.collectives.schedule import Transfers, in_turn, together
from syncline.errors import UserError
from tests.comm.collectives.programs import Row, own


def schedule(*rows: Row) -> Schedule:
    return own("all-reduce", 3, 4, *rows)


def test_a_program_of_ones_own() -> None:
    made = schedule((0, 0, 1, 0, 4, True), (1, 1, 2, 0, 2, True), (2, 1, 0, 2, 4, False))
    steps = [Step(0, "reduce", 0, 0, 4), Step(1, "send", 2, 0, 2), Step(2, "send", 0, 2, 4)]
    assert made.program(1) == steps
    assert made.steps == len(made) == 3


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 3, 1, 0, 1, True)], "transfer 0 .* a rank does not exist"),
        ([(0, 0, -1, 0, 1, True)], "a rank does not exist"),
        ([(0, 1, 1, 0, 1, True)], "a rank sends to itself"),
        ([(0, 0, 1, 0, 5, True)], "its blocks do not exist"),
        ([(0, 0, 1, 2, 2, True)], "its blocks do not exist"),
        ([(0, 0, 1, -1, 2, True)], "its blocks do not exist"),
        ([(-1, 0, 1, 0, 1, True)], "its step is negative"),
        ([(1, 0, 1, 0, 1, True), (0, 0, 1, 0, 1, True)], "transfer 1 .* before that of the row"),
        ([(0, 0, 1, 0, 2, True), (0, 2, 1, 1, 3, True)], "gets a block twice in a step"),
        ([(0, 0, 1, 0, 1, False), (0, 1, 0, 0, 1, True)], "transfer 0 .* overwrites what it sends"),
    ],
)
def test_wrong_programs(rows: list[Row], said: str) -> None:
    with pytest.raises(UserError, match=said):
        schedule(*rows)


def test_an_exchange_that_reduces_is_right() -> None:
    assert len(schedule((0, 0, 1, 0, 1, True), (0, 1, 0, 0, 1, True))) == 2


def test_programs_are_read_only() -> None:
    made = program("all-reduce", "ring", 3)
    with pytest.raises(ValueError, match="read-only"):
        made.step[0] = 1


def test_no_such_rank() -> None:
    with pytest.raises(UserError, match="has ranks 0 to 2, not 3"):
        program("all-reduce", "ring", 3).program(3)


@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 10**12 + 1])
def test_blocks_are_nearly_equal(length: int) -> None:
    sizes = np.diff(program("all-reduce", "ring", 7).block_offsets(length))
    assert sizes.sum() == length
    assert sizes.max() - sizes.min() <= 1


def test_a_ring_of_a_thousand_is_compact() -> None:
    made = program("all-reduce", "ring", 1024)
    assert len(made) == 2 * 1023 * 1024
    assert sum(column.nbytes for column in made.transfers()) == 21 * len(made)


HOP = Transfers.of(step=[0, 2], source=[0, 1], destination=[1, 2], block_start=3, reduces=True)


def test_columns_broadcast_together() -> None:
    alike = {"destination": 9, "block_start": 4, "block_stop": 6, "reduces": False}
    grid = Transfers.of(step=np.arange(2)[:, None], source=np.arange(3), **alike)
    assert grid.step.tolist() == [0, 0, 0, 1, 1, 1]
    assert grid.source.tolist() == [0, 1, 2] * 2
    assert {len(column) for column in grid} == {6}
    assert all(column.dtype == np.int32 for column in grid[:-1])


def test_backwards_and_back_again() -> None:
    there = HOP.backwards(reduces=False)
    assert there.step.tolist() == [2, 0]
    assert (there.source.tolist(), there.destination.tolist()) == ([1, 2], [0, 1])
    assert not there.reduces.any()
    assert all((a == b).all() for a, b in zip(there.backwards(reduces=True), HOP, strict=True))


def test_in_turn_leaves_out_nothing_and_mixes_nothing() -> None:
    both = in_turn(HOP, together(), HOP)
    assert both.step.tolist() == [0, 2, 3, 5]
    assert both.steps == 6
    assert together(HOP, HOP).step.tolist() == [0, 2, 0, 2]
    assert together().steps == 0
