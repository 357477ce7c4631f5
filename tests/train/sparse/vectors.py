"""Drawing sparse and dense vectors, and the slow definitions that fast code is compared with."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from syncline.train.sparse.vector import SparseVector

Dense = NDArray[np.float32]

whole = st.integers(-4, 4).map(float)
"""Small whole numbers: many ties and cancellations, and sums without rounding."""
ordinary = st.floats(-1e6, 1e6, width=32)
values = st.one_of(whole, ordinary)


@st.composite
def dense_vectors(
    draw: st.DrawFn, *, length: int | None = None, exact: bool = False, longest: int = 80
) -> Dense:
    """Draw a vector, often with many zeros.

    Args:
        length: in elements; any if None.
        exact: of whole numbers only.
        longest: the most elements.
    """
    size = draw(st.integers(0, longest)) if length is None else length
    kind = whole if exact or draw(st.booleans()) else values
    drawn = draw(st.lists(kind, min_size=size, max_size=size))
    return np.array(drawn, np.float32)


SHAPES = ("normal", "rising", "few values", "mostly zeros", "ends", "equal", "columns", "two kinds")


def shaped(shape: str, elements: int) -> Dense:
    """Return a vector long enough to guess from a sample, which some shapes mislead."""
    generator = np.random.default_rng(0)
    normal = generator.standard_normal(elements, np.float32)
    rare = generator.random(elements) < 0.001
    place = np.arange(elements, dtype=np.float32)
    found = {
        "normal": normal,
        "rising": place,
        "few values": np.round(normal),
        "mostly zeros": np.where(rare, normal, 0),
        "ends": np.where(place < elements - elements // 350, normal * np.float32(1e-3), normal),
        "equal": np.ones(elements),
        "columns": np.where(place % 1024 < 16, normal * 1000, normal),
        "two kinds": np.where(rare, normal * np.float32(1e30), normal * np.float32(1e-30)),
    }[shape]
    return found.astype(np.float32)


def entries_of(dense: Dense) -> SparseVector:
    """Return the elements that are not zero."""
    indices = np.flatnonzero(dense).astype(np.uint32)
    return SparseVector(len(dense), indices, dense[indices])


@st.composite
def sparse_vectors(draw: st.DrawFn, length: int) -> SparseVector:
    return entries_of(draw(dense_vectors(length=length)))


def largest(dense: Dense, k: int) -> SparseVector:
    """Return the k elements of largest magnitude that are not zero, by sorting."""
    order = sorted(np.flatnonzero(dense), key=lambda i: (-abs(float(dense[i])), i))[:k]
    indices = np.array(sorted(order), np.uint32)
    return SparseVector(len(dense), indices, dense[indices])


def assert_same(found: SparseVector, expected: SparseVector) -> None:
    """Fail unless two vectors have the same entries, bit for bit."""
    assert found.length == expected.length
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.values.view(np.uint32), expected.values.view(np.uint32))
