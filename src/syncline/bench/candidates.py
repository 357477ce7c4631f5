"""The ways to run a collective that ``syncline tune`` measures."""

from __future__ import annotations

from typing import NamedTuple

from syncline.collectives import PROGRAMS, Collective, Fixed, Pipelined
from syncline.groups import Choice
from syncline.groups.choices import BLOCK_BYTES, HIERARCHICAL, Region, choose
from syncline.groups.site import Hosts

__all__ = ["BLOCKS_BYTES", "Candidate", "built_in_candidate", "candidates"]

BLOCKS_BYTES = tuple(kib << 10 for kib in (16, 64, 256, 1024))
"""Sizes of blocks to try: a quarter of a fragment, a fragment, and more."""


class Candidate(NamedTuple):
    """An algorithm, and the size of its blocks where it is told how to cut the vector."""

    algorithm: str
    block_bytes: int | None = None

    def region(self, from_bytes: int) -> Region:
        """Return it as what is taken from a size on."""
        return Region(from_bytes=from_bytes, algorithm=self.algorithm, block_bytes=self.block_bytes)

    def choice(self, size_bytes: int) -> Choice:
        """Return how a vector of so many bytes is exchanged: for several candidates alike."""
        return self.region(0).choice(size_bytes)


def candidates(collective: Collective, layout: Hosts) -> tuple[Candidate, ...]:
    """Return all ways to run a collective.

    Two papers name two all-reduces differently; those come under the first name.

    Args:
        collective: which.
        layout: the ranks of each host.
    """
    found: list[Candidate] = []
    seen: list[Fixed | Pipelined] = []
    for algorithm, entry in PROGRAMS[collective].items():
        if any(entry is other for other in seen):
            continue
        seen.append(entry)
        if isinstance(entry, Pipelined):
            found += [Candidate(algorithm, block_bytes) for block_bytes in BLOCKS_BYTES]
        else:
            found.append(Candidate(algorithm))
    if collective == "all-reduce" and len(layout) > 1 and any(len(host) > 1 for host in layout):
        found.append(Candidate(HIERARCHICAL))
    return tuple(found)


def built_in_candidate(collective: Collective, layout: Hosts, size_bytes: int) -> Candidate:
    """Return what a group takes without having measured."""
    choice = choose(collective, layout, size_bytes)
    return Candidate(choice.algorithm, None if choice.blocks is None else BLOCK_BYTES)
