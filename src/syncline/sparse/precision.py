"""In what precision values travel, and what rounding leaves behind."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from syncline import _native
from syncline.sparse.vector import SparseVector

__all__ = ["PRECISIONS", "Precision", "from_wire", "rounded", "to_wire", "value_bytes"]

Precision = Literal["float32", "bfloat16", "float16"]

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
NATIVE = {"bfloat16": 2, "float16": 3}
"""The core's numbers of the types of 16 bits."""


def value_bytes(precision: Precision) -> int:
    """Return the bytes of a value."""
    return 4 if precision == "float32" else 2


def to_wire(values: NDArray[np.float32], precision: Precision) -> NDArray[np.uint8]:
    """Return the bytes of values, little-endian.

    Values are rounded to the nearest even. Those beyond the largest number become that number, so
    that the remainder is finite.
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
    """Return the vector as it arrives at a peer, and what is missing from it then.

    The two add up to the vector: a float32 less its nearest bfloat16 or float16 is a float32,
    unless the value was beyond the largest float16. What rounds to zero is no entry.
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
