"""Parts of programs, put together."""

from __future__ import annotations

import numpy as np

from syncline.collectives.transfers import Transfers, in_turn, together

HOP = Transfers.of(step=[0, 2], source=[0, 1], destination=[1, 2], block_start=3, reduces=True)


def test_columns_broadcast_together() -> None:
    grid = Transfers.of(
        step=np.arange(2)[:, None],
        source=np.arange(3),
        destination=9,
        block_start=4,
        block_stop=6,
        reduces=False,
    )
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


def test_moved() -> None:
    moved = HOP.moved([2, 0, 1])
    assert (moved.source.tolist(), moved.destination.tolist()) == ([2, 0], [0, 1])
