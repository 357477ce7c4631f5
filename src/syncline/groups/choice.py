"""Which algorithm runs a collective, by its size and the number of ranks."""

from __future__ import annotations

from typing import NamedTuple

from syncline.collectives import Collective

__all__ = ["Choice", "choose"]

SMALL_BYTES = 32 * 1024
"""Up to here startups cost more than bytes."""


class Choice(NamedTuple):
    """An algorithm, and blocks where it is told how many."""

    algorithm: str
    blocks: int | None = None


def choose(collective: Collective, ranks: int, size_bytes: int) -> Choice:
    """Return what is fastest on shared memory."""
    small = size_bytes <= SMALL_BYTES
    if collective == "all-reduce":
        return Choice("recursive-doubling" if small else "direct")
    if collective in ("broadcast", "reduce"):
        return Choice("minimum-spanning-tree" if small and ranks > 2 else "direct")
    return Choice("direct")
