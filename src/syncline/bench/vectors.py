"""The vectors of a lap: what a rank gives to a collective, and where its result goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.bench.bandwidth import ELEMENT_BYTES
from syncline.collectives import Collective
from syncline.errors import InternalError

__all__ = ["Vectors", "fresh", "require_result", "sizes_of"]

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Vectors:
    """Memory of one rank; the two are the same where the collective works in place."""

    given: Vector
    result: Vector
    keep: Any = None
    """What the memory belongs to."""


def sizes_of(collective: Collective, ranks: int, size_bytes: int) -> tuple[int, int]:
    """Return how many elements a rank gives, and how many it gets.

    Args:
        collective: which.
        ranks: how many.
        size_bytes: of the whole vector.
    """
    whole = size_bytes // ELEMENT_BYTES
    if collective == "reduce-scatter":
        return whole, whole // ranks
    if collective == "all-gather":
        return whole // ranks, whole
    return whole, whole


def fresh(collective: Collective, ranks: int, size_bytes: int) -> Vectors:
    """Return vectors in memory of this process."""
    given, result = sizes_of(collective, ranks, size_bytes)
    vector = np.zeros(given, np.float32)
    return Vectors(vector, vector if given == result else np.zeros(result, np.float32))


def require_result(collective: Collective, vectors: Vectors, rank: int, ranks: int) -> None:
    """Check the result of ranks that gave their number plus one.

    Raises:
        InternalError: it is wrong.
    """
    total = ranks * (ranks + 1) / 2
    result = vectors.result
    if collective == "reduce" and rank != 0:
        return
    if collective == "broadcast":
        expected: Any = 1.0
    elif collective == "all-gather":
        expected = np.arange(1, ranks + 1, dtype=np.float32)[:, None]
        result = result.reshape(ranks, -1)
    else:
        expected = total
    if not bool((result == expected).all()):
        raise InternalError(f"rank {rank}: {collective} of {vectors.given.size} elements is wrong")
