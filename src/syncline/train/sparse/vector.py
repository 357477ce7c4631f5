"""``SparseVector``: a vector with few nonzero elements, and how two of them merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from syncline import _native
from syncline.errors import InternalError
from syncline.plan.recipe import Wire


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Entries in ascending order of their indices; each index occurs once."""

    length: int  # length of the dense vector, in elements; at most 2^32 - 1
    indices: NDArray[np.uint32]  # of shape (entries,)
    values: NDArray[np.float32]  # of shape (entries,)

    def __post_init__(self) -> None:
        if self.indices.shape != self.values.shape:
            raise InternalError(f"{self.indices.shape} indices for {self.values.shape} values")

    @classmethod
    def empty(cls, length: int) -> Self:
        """Return a vector without entries."""
        return cls(length, np.empty(0, np.uint32), np.empty(0, np.float32))

    def __len__(self) -> int:
        return len(self.indices)

    def dense(self) -> NDArray[np.float32]:
        """Return all elements, of shape (length,)."""
        result = np.zeros(self.length, np.float32)
        result[self.indices] = self.values
        return result

    def parts(self, lengths: Sequence[int]) -> Iterator[SparseVector]:
        """Yield consecutive parts, whose lengths in elements add up to this vector's."""
        start, first = 0, 0
        for length in lengths:
            stop = int(np.searchsorted(self.indices, first + length))
            yield SparseVector(
                length, self.indices[start:stop] - np.uint32(first), self.values[start:stop]
            )
            start, first = stop, first + length

    def divided(self, indices: NDArray[np.uint32]) -> tuple[SparseVector, SparseVector]:
        """Return the entries at these ascending indices, and the other entries."""
        parts = _native.sparse_divide(self.indices, self.values, indices)
        return SparseVector(self.length, *parts[:2]), SparseVector(self.length, *parts[2:])


class Quota(NamedTuple):
    """How many entries are kept of each part of a vector."""

    lengths: tuple[int, ...]  # lengths of the parts, in elements
    counts: tuple[int, ...]  # the most entries of each part

    @property
    def length(self) -> int:
        """Length of the vector, in elements."""
        return sum(self.lengths)

    @property
    def k(self) -> int:
        """The most entries of the vector."""
        return sum(self.counts)


def merged(a: SparseVector, b: SparseVector, quota: Quota) -> tuple[SparseVector, SparseVector]:
    """Return the largest entries of every part of ``a + b``, and the other entries of the sum.

    The same bits for ``(b, a)``. Of equal magnitudes the lower index is kept. Entries whose sum is
    exactly zero are in neither result: nothing of them is left to send. O(entries).

    Source: gTop-k, Definition 1 (the operator T), which does not say what happens to the others.
    """
    ends = np.cumsum(quota.lengths, dtype=np.uint64)
    counts = np.array(quota.counts, np.uint64)
    parts = _native.sparse_merge(a.indices, a.values, b.indices, b.values, ends, counts)
    return SparseVector(a.length, *parts[:2]), SparseVector(a.length, *parts[2:])


def joined(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the concatenation of vectors."""
    firsts = np.cumsum([0, *(vector.length for vector in vectors)])
    indices = [v.indices + np.uint32(f) for v, f in zip(vectors, firsts[:-1], strict=True)]
    return SparseVector(
        int(firsts[-1]),
        np.concatenate([np.empty(0, np.uint32), *indices]),
        np.concatenate([np.empty(0, np.float32), *(vector.values for vector in vectors)]),
    )


def total(length: int, vectors: Iterable[SparseVector]) -> SparseVector:
    """Return the sum of any number of vectors, added in their order."""
    result, everything = SparseVector.empty(length), Quota((length,), (length,))
    for vector in vectors:
        if len(vector):
            result = merged(result, vector, everything)[0] if len(result) else vector
    return result


Precision = Wire
PRECISIONS: tuple[Precision, ...] = get_args(Wire)
NATIVE = {"bfloat16": 2, "float16": 3}  # the core's numbers of the types of 16 bits


def to_wire(values: NDArray[np.float32], precision: Precision) -> NDArray[np.uint8]:
    """Return the bytes of values, little-endian, rounded to the nearest even.

    Values beyond the largest number become that number, so that the remainder is finite.
    """
    if precision == "float32":
        return values.astype("<f4", copy=False).view(np.uint8)
    return _native.narrow(values, NATIVE[precision]).astype("<u2", copy=False).view(np.uint8)


def from_wire(data: NDArray[np.uint8], precision: Precision) -> NDArray[np.float32]:
    """Return the values, in a new array."""
    if precision == "float32":
        return data.view("<f4").astype(np.float32)
    return _native.widen(data.view("<u2").astype(np.uint16), NATIVE[precision])


def rounded(vector: SparseVector, precision: Precision) -> tuple[SparseVector, SparseVector]:
    """Return the vector as it arrives at a peer, and the remainder.

    The two add up to the vector: a float32 minus its nearest bfloat16 or float16 is a float32,
    unless the value was beyond the largest float16. A value that rounds to zero is no entry.
    """
    if precision == "float32":
        return vector, SparseVector.empty(vector.length)
    arriving = from_wire(to_wire(vector.values, precision), precision)
    remainder = vector.values - arriving
    travels, remains = arriving != 0, remainder != 0
    return (
        SparseVector(vector.length, vector.indices[travels], arriving[travels]),
        SparseVector(vector.length, vector.indices[remains], remainder[remains]),
    )
