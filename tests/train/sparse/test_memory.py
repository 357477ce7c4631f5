"""The two memories: operations of torch against the native core, bit for bit."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.train.sparse.memory import ZERO_BLOCK, HostMemory, Memory, Tracked
from syncline.train.sparse.torch_memory import TorchMemory
from syncline.train.sparse.vector import SparseVector
from tests.train.sparse.vectors import (
    SHAPES,
    Dense,
    assert_same,
    dense_vectors,
    shaped,
    sparse_vectors,
)

HOST, TORCH = HostMemory(), TorchMemory()
odd = st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38])
sizes = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@st.composite
def parts(draw: st.DrawFn, *, arrays: int) -> list[Dense]:
    """Draw a residual, a gradient and perhaps a velocity, with odd values here and there."""
    length = draw(st.integers(0, 40))
    drawn = [draw(dense_vectors(length=length)) for _ in range(arrays)]
    for array in drawn:
        if length and draw(st.integers(0, 19)) == 0:
            array[draw(st.integers(0, length - 1))] = draw(odd)
    return drawn


Rows = list[list[list[Dense]]]  # units of parts of arrays


@st.composite
def several_units(draw: st.DrawFn) -> Rows:
    """Draw what is selected from: units of one part or of several, also empty ones."""
    arrays = draw(st.sampled_from([2, 3]))
    return draw(
        st.lists(st.lists(parts(arrays=arrays), min_size=1, max_size=3), min_size=1, max_size=4)
    )


def tracked(rows: Rows) -> list[list[Tracked]]:
    return [
        [Tracked(*(torch.from_numpy(array.copy()) for array in arrays)) for arrays in unit]
        for unit in rows
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return what identifies values; all NaN are one."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32).cpu()


def taken_by(
    memory: Memory, units: list[list[Tracked]], counts: list[int], momentum: float = 0.0
) -> SparseVector | int:
    # Infinity less infinity, and what exceeds the largest number, are drawn on purpose.
    with np.errstate(all="ignore"):
        return memory.take(units, counts, momentum=momentum)


def require_same(memory: Memory, rows: Rows, counts: list[int], momentum: float = 0.0) -> None:
    """Fail unless a memory takes what the native core takes, and leaves the same."""
    native = tracked(rows)
    there = [
        [Tracked(*(t.to(memory.device, copy=True) for t in each if t is not None)) for each in unit]
        for unit in native
    ]
    expected = taken_by(HOST, native, counts, momentum)
    found = taken_by(memory, there, counts, momentum)
    if isinstance(expected, int):
        assert found == expected
        return
    assert_same(found, expected)
    for ours, theirs in zip(chain(*there), chain(*native), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            if other is not None:
                assert bits(mine).equal(bits(other))


@given(several_units(), st.data(), st.sampled_from([0.0, 0.5, 0.9]))
def test_both_take_the_same(rows: Rows, data: st.DataObject, momentum: float) -> None:
    """Entries, and everything that is left: ties, zeros, NaN, infinities, empty parts, all."""
    require_same(TORCH, rows, [data.draw(st.integers(0, 45)) for _ in rows], momentum)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_take_the_same_of_large_vectors(shape: str) -> None:
    elements = 300_017
    dense = shaped(shape, elements)
    zeros = np.zeros_like(dense)
    rows = [[[dense, zeros]], [[dense[:50], zeros[:50]]], [[dense[7:], zeros[7:]]]]
    for k in (1, 300, 30_000, elements):
        require_same(TORCH, rows, [k, 3, 200])


@given(st.data(), sizes)
def test_both_add_and_write_the_same(data: st.DataObject, lengths: list[int]) -> None:
    vector: SparseVector = data.draw(sparse_vectors(sum(lengths)))
    before = [torch.from_numpy(data.draw(dense_vectors(length=length))) for length in lengths]
    for act in ("add", "write"):
        native, torch_s = ([t.clone() for t in before] for _ in range(2))
        getattr(HOST, act)(native, vector)
        getattr(TORCH, act)(torch_s, vector)
        assert bits(torch.cat(torch_s)).equal(bits(torch.cat(native)))
        if act == "write":
            assert torch.cat(torch_s).tolist() == vector.dense().tolist()


@given(st.lists(dense_vectors(longest=12), min_size=1, max_size=5), st.data())
def test_both_see_zeros_and_what_is_not_finite(drawn: list[Dense], data: st.DataObject) -> None:
    for array in drawn:
        if len(array) and data.draw(st.booleans()):
            array[data.draw(st.integers(0, len(array) - 1))] = data.draw(odd)
    tensors = [torch.from_numpy(array) for array in drawn]
    bad = [n for n, array in enumerate(drawn) if not np.isfinite(array).all()]
    for memory in (HOST, TORCH):
        assert memory.first_not_finite(tensors) == (bad[0] if bad else None)
        assert memory.are_zero(tensors) == [len(array) > 0 and not np.any(array) for array in drawn]


@pytest.mark.parametrize("length", [ZERO_BLOCK, ZERO_BLOCK + 1, 3 * ZERO_BLOCK - 1])
def test_one_that_is_not_zero_is_seen_anywhere(length: int) -> None:
    for memory in (HOST, TORCH):
        assert memory.are_zero([torch.zeros(length)]) == [True]
        for place in (0, ZERO_BLOCK - 1, ZERO_BLOCK, length - 1):
            values = torch.zeros(length)
            values[min(place, length - 1)] = 1e-45
            assert memory.are_zero([values]) == [False]


def test_too_many_elements() -> None:
    large = torch.empty(1).expand(2**32)
    for memory in (HOST, TORCH):
        with pytest.raises(UserError, match=r"4294967296 elements .* at most 2\^32 - 1"):
            memory.take([[Tracked(large, large)]], [1], momentum=0.0)
