"""Sparse vectors against dense ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import InternalError
from syncline.train.sparse.vector import Quota, SparseVector, joined, merged, total
from tests.train.sparse.vectors import (
    assert_same,
    dense_vectors,
    entries_of,
    largest,
    sparse_vectors,
)


@given(st.data(), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), max_size=4))
def test_merging_is_adding_and_selecting(data: st.DataObject, parts: list[tuple[int, int]]) -> None:
    quota = Quota(tuple(n for n, _ in parts), tuple(k for _, k in parts))
    a, b = (data.draw(sparse_vectors(quota.length)) for _ in range(2))
    kept, dropped = merged(a, b, quota)
    dense = a.dense() + b.dense()
    cuts = np.split(dense, np.cumsum(quota.lengths)[:-1]) if parts else []
    expected = [largest(part, k) for part, k in zip(cuts, quota.counts, strict=True)]
    assert_same(kept, joined(expected))
    assert_same(dropped, entries_of(dense - kept.dense()))
    swapped, swapped_dropped = merged(b, a, quota)
    assert_same(swapped, kept)
    assert_same(swapped_dropped, dropped)


@given(st.data(), st.integers(0, 60))
def test_dividing(data: st.DataObject, length: int) -> None:
    vector, chosen = data.draw(sparse_vectors(length)), data.draw(sparse_vectors(length))
    inside, outside = vector.divided(chosen.indices)
    assert set(inside.indices) == set(vector.indices) & set(chosen.indices)
    assert set(outside.indices) == set(vector.indices) - set(chosen.indices)
    assert_same(total(length, [inside, outside]), vector)


@given(st.lists(dense_vectors(length=20, exact=True), max_size=5))
def test_totals(vectors: list[np.ndarray]) -> None:
    found = total(20, map(entries_of, vectors))
    np.testing.assert_array_equal(found.dense(), sum(vectors, np.zeros(20, np.float32)))


def test_dense_and_back() -> None:
    vector = entries_of(np.array([0, 1.5, 0, -2], np.float32))
    assert len(vector) == 2
    np.testing.assert_array_equal(vector.dense(), [0, 1.5, 0, -2])
    assert len(SparseVector.empty(4)) == 0
    with pytest.raises(InternalError, match=r"\(2,\) indices for \(1,\) values"):
        SparseVector(4, vector.indices, vector.values[:1])


@given(st.lists(dense_vectors(longest=12), max_size=5))
def test_parts_and_back(parts: list[np.ndarray]) -> None:
    vectors = [entries_of(part) for part in parts]
    whole = joined(vectors)
    np.testing.assert_array_equal(whole.dense(), np.concatenate([np.empty(0, np.float32), *parts]))
    for found, vector in zip(whole.parts([len(p) for p in parts]), vectors, strict=True):
        assert_same(found, vector)
