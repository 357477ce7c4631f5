"""Taking the k elements of largest magnitude out of vectors in memory, by the native core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from syncline import _native
from syncline.errors import UserError
from syncline.sparse.vector import SparseVector

__all__ = [
    "INSTRUCTIONS",
    "Instructions",
    "Selection",
    "SelectionPart",
    "first_not_finite",
    "require_selectable",
    "select",
]

Instructions = Literal["widest", "portable", "avx2", "avx512"]

INSTRUCTIONS: dict[Instructions, int] = {"widest": -1, "portable": 0, "avx2": 1, "avx512": 2}
"""Sets of vector instructions, by the native core's number. All give the same bits."""


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


@dataclass(frozen=True, slots=True)
class Selection:
    """The result of a selection."""

    taken: SparseVector
    threshold: int
    """Bits of a magnitude: all elements above it were taken, none below."""
    finite: bool
    """Whether all values are finite after the addition; otherwise none was taken."""
    exact: bool
    """Whether the k largest were taken."""


def select(
    parts: Sequence[SelectionPart],
    k: int,
    *,
    momentum: float = 0.0,
    clear: bool = True,
    hint: int = 0,
    slack: float = 1.0,
    instructions: Instructions = "widest",
) -> Selection:
    """Add gradients to values, take the k of largest magnitude, and set those to zero.

    One pass over the data: a threshold is guessed from a sample, what exceeds it is collected, and
    the k largest of that are the result; exact whatever the guess, in O(elements) for any data. Of
    equal magnitudes the lower index is taken. Zeros are never taken, so there may be fewer.

    Args:
        parts: of the vector; below 2^32 elements in all.
        k: how many, from 0 on; more than there are elements means all.
        momentum: of the velocities, where parts have some.
        clear: whether values, and velocities with them (factor masking), are set to zero.
        hint: a threshold to begin with instead of a sample: the last selection's.
        slack: at least 1; with a hint, everything above it is taken as it is where that is between
            ``k / slack`` and ``k slack`` entries; where not, exactly k are.
        instructions: that the loop is to use.

    Raises:
        UserError: an argument is out of its range, or the processor lacks the instructions.

    Source: for momentum and factor masking, Deep Gradient Compression (Lin et al., 2018), sections
    3.2 and 3.3 and Algorithm 4; the selection is ours.
    """
    if k < 0 or slack < 1:
        raise UserError(f"selection needs k of at least 0 and slack of at least 1: {k}, {slack}")
    number = INSTRUCTIONS[instructions]
    if number > 0 and not _native.has_instructions(number):
        raise UserError(f"this processor has no {instructions}; leave instructions at 'widest'")
    length = sum(part.elements for part in parts)
    require_selectable(length)
    least, most = (k, k) if slack == 1 else (-int(-k // slack), int(k * slack))
    indices, values, threshold, finite, exact = _native.select(
        [(part.values, part.gradient, part.velocity, part.elements) for part in parts],
        momentum,
        k,
        least,
        most,
        hint,
        clear,
        number,
    )
    return Selection(SparseVector(length, indices, values), threshold, finite, exact)


def require_selectable(elements: int) -> None:
    """Raise UserError if indices of so many elements are of more than 32 bits."""
    if elements >= 2**32:
        raise UserError(f"{elements} elements are selected from; at most 2^32 - 1 can be")


def first_not_finite(
    address: int, elements: int, *, instructions: Instructions = "widest"
) -> int | None:
    """Return the first element that is infinite or NaN of contiguous float32 on the CPU."""
    found = _native.first_not_finite(address, elements, INSTRUCTIONS[instructions])
    return None if found == elements else found
