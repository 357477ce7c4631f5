"""Selection against sorting, with every set of instructions of this processor."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline import _native
from syncline.train.sparse.memory import INSTRUCTIONS, HostMemory, Tracked
from syncline.train.sparse.vector import SparseVector
from tests.train.sparse.vectors import SHAPES, Dense, assert_same, dense_vectors, largest, shaped

PRESENT = [n for n in INSTRUCTIONS.values() if n < 0 or _native.has_instructions(n)]
Row = tuple[int, int, int, int]
"""Addresses of values, gradient and velocity, or 0, and how many elements."""
every = pytest.mark.parametrize("instructions", PRESENT)


class Selection(NamedTuple):
    taken: SparseVector
    threshold: int
    finite: bool
    exact: bool


def select_by(
    instructions: int,
    rows: list[Row],
    k: int,
    *,
    momentum: float = 0.0,
    clear: bool = True,
    hint: int = 0,
    slack: float = 1.0,
) -> Selection:
    """Select by the native core, which also takes a threshold to begin with."""
    least, most = (k, k) if slack == 1 else (-int(-k // slack), int(k * slack))
    indices, values, *rest = _native.select(
        rows, momentum, k, least, most, hint, clear, instructions
    )
    length = sum(row[3] for row in rows)
    return Selection(SparseVector(length, indices, values), *rest)


def part_of(values: Dense, gradient: Dense | None = None, velocity: Dense | None = None) -> Row:
    gradients, velocities = (0 if a is None else a.ctypes.data for a in (gradient, velocity))
    return values.ctypes.data, gradients, velocities, len(values)


@every
@given(st.data(), dense_vectors(longest=300))
def test_the_largest_are_taken(instructions: int, data: st.DataObject, dense: Dense) -> None:
    k = data.draw(st.integers(0, len(dense) + 2))
    cut = data.draw(st.integers(0, len(dense)))
    left = dense.copy()
    parts = [part_of(left[:cut]), part_of(left[cut:])]
    found = select_by(instructions, parts, k)
    expected = largest(dense, k)
    assert found.finite
    assert found.exact
    assert_same(found.taken, expected)
    np.testing.assert_array_equal(left, dense - expected.dense())
    magnitudes = np.abs(dense).view(np.uint32)
    assert set(np.flatnonzero(magnitudes > found.threshold)) <= set(found.taken.indices) or k == 0


@every
@given(st.data(), st.integers(0, 200), st.sampled_from([0.0, 0.5, 0.9]))
def test_gradients_and_velocities_are_added(
    instructions: int, data: st.DataObject, length: int, momentum: float
) -> None:
    residual, gradient, velocity = (data.draw(dense_vectors(length=length)) for _ in range(3))
    k = data.draw(st.integers(0, length))
    moved = np.float32(momentum) * velocity + gradient
    expected = largest(residual + moved, k)
    values, speeds = residual.copy(), velocity.copy()
    found = select_by(instructions, [part_of(values, gradient, speeds)], k, momentum=momentum)
    assert_same(found.taken, expected)
    mask = np.ones(length, bool)
    mask[expected.indices] = False
    np.testing.assert_array_equal(values, np.where(mask, residual + moved, 0))
    np.testing.assert_array_equal(speeds, np.where(mask, moved, 0))


@every
@given(st.data(), dense_vectors(longest=200), st.integers(0, 40), st.floats(1, 4))
def test_a_threshold_used_again_keeps_its_bound(
    instructions: int, data: st.DataObject, dense: Dense, k: int, slack: float
) -> None:
    hint = int(np.float32(data.draw(st.floats(0.25, 1e6))).view(np.uint32))
    found = select_by(instructions, [part_of(dense)], k, hint=hint, slack=slack, clear=False)
    if found.exact:
        assert_same(found.taken, largest(dense, k))
    else:
        assert k / slack <= len(found.taken) <= k * slack
        assert found.threshold == hint
        assert_same(found.taken, largest(dense, len(found.taken)))


@every
@given(dense_vectors(longest=200), st.data())
def test_what_is_not_finite_is_found(instructions: int, dense: Dense, data: st.DataObject) -> None:
    address = dense.ctypes.data
    assert _native.first_not_finite(address, len(dense), instructions) == len(dense)
    bad = data.draw(st.sets(st.integers(0, len(dense) - 1), min_size=1)) if len(dense) else set()
    for index in bad:
        dense[index] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    found = _native.first_not_finite(address, len(dense), instructions)
    assert found == (min(bad) if bad else len(dense))
    if bad:
        tensor = torch.from_numpy(dense)
        tracked = Tracked(tensor, torch.zeros_like(tensor))
        assert HostMemory().take([[tracked]], [1], momentum=0.0) == 0
        selection = select_by(instructions, [part_of(dense)], 1)
        assert not selection.finite
        assert len(selection.taken) == 0


@every
def test_large_vectors_of_many_shapes(instructions: int) -> None:
    for shape in SHAPES[:5]:
        dense = shaped(shape, 700_001)
        order = np.argsort(-np.abs(dense), kind="stable")
        for k in (1, 700, 70_000):
            wanted = order[:k][dense[order[:k]] != 0]
            found = select_by(instructions, [part_of(dense)], k, clear=False)
            np.testing.assert_array_equal(found.taken.indices, np.sort(wanted), err_msg=shape)
