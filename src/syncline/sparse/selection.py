"""Taking the k elements of largest magnitude out of vectors in memory, by the native core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from syncline import _native
from syncline.errors import UserError
from syncline.sparse.vector import SparseVector

INSTRUCTIONS = {"widest": -1, "portable": 0, "avx2": 1, "avx512": 2}
"""Sets of vector instructions, by the native core's number. All give the same bits."""
WIDEST = INSTRUCTIONS["widest"]


class SelectionPart(NamedTuple):
    """A part of a vector: contiguous float32 on the CPU.

    The caller keeps the memory alive. An address is 0 if there is no such array.
    """

    values: int
    """Address of the values to select from, such as a residual."""
    elements: int
    gradient: int = 0
    """Address of the gradient, which is added to the values first."""
    velocity: int = 0
    """Address of the velocity, with momentum correction: it becomes ``momentum * velocity +
    gradient``, and is added instead of the gradient."""


def select(
    parts: Sequence[SelectionPart], k: int, *, momentum: float = 0.0, clear: bool = True
) -> SparseVector | None:
    """Add gradients to values, take the k of largest magnitude, and set those to zero.

    One pass over the data: a threshold is guessed from a sample, what exceeds it is collected, and
    the k largest of that are the result; exact whatever the guess, in O(elements) for any data. Of
    equal magnitudes the lower index is taken. Zeros are never taken, so there may be fewer.

    Args:
        parts: of the vector; below 2^32 elements in all.
        k: how many, from 0 on; more than there are elements means all.
        momentum: of the velocities, where parts have some.
        clear: whether values, and velocities with them (factor masking), are set to zero.

    Returns:
        What was taken; None if a value is not finite after the addition: then nothing was.

    Raises:
        UserError: there are too many elements.

    Source: for momentum and factor masking, Deep Gradient Compression (Lin et al., 2018), sections
    3.2 and 3.3 and Algorithm 4; the selection is ours.
    """
    length = sum(part.elements for part in parts)
    require_selectable(length)
    rows = [(part.values, part.gradient, part.velocity, part.elements) for part in parts]
    # No bounds but k, and no threshold to begin with.
    indices, values, _, finite, _ = _native.select(rows, momentum, k, k, k, 0, clear, WIDEST)
    return SparseVector(length, indices, values) if finite else None


def require_selectable(elements: int) -> None:
    """Raise UserError if indices of so many elements are of more than 32 bits."""
    if elements >= 2**32:
        raise UserError(f"{elements} elements are selected from; at most 2^32 - 1 can be")


def first_not_finite(address: int, elements: int) -> int | None:
    """Return the first element that is infinite or NaN of contiguous float32 on the CPU."""
    found = _native.first_not_finite(address, elements, WIDEST)
    return None if found == elements else found
