"""Which algorithm runs a collective, by its size and where the ranks are."""

from __future__ import annotations

from typing import NamedTuple

from syncline.collectives import Collective

__all__ = ["Choice", "Hosts", "choose"]

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host."""

SMALL_SHARED_BYTES = 64 * 1024
"""Up to here startups cost more than bytes, in shared memory ..."""
SMALL_BETWEEN_BYTES = 8 * 1024
"""... and between hosts."""
FEW_RANKS = 4
"""Of a host, whose sums a tree takes to one of them sooner than if each summed a part: then all but
the root would need memory of their own for that."""
BLOCK_BYTES = 64 * 1024
"""Of a pipeline between hosts: as large as a fragment."""
MOST_BLOCKS = 1024


class Choice(NamedTuple):
    """An algorithm, and blocks where it is told how many."""

    algorithm: str
    blocks: int | None = None


def choose(collective: Collective, hosts: Hosts, size_bytes: int) -> Choice:
    """Return the algorithm for a vector of so many bytes.

    Inside a host whoever needs something reads it from whoever has it. Between hosts links are
    slow, so every byte goes over each link as seldom as it can: in a ring, which for several ranks
    a host is one of hosts, or along a pipeline.
    """
    if len(hosts) == 1:
        return _inside(collective, len(hosts[0]), size_bytes)
    small = size_bytes <= SMALL_BETWEEN_BYTES
    if collective == "all-reduce":
        if small:
            return Choice("recursive-doubling")
        return Choice("ring" if all(len(host) == 1 for host in hosts) else "hierarchical")
    if collective in ("broadcast", "reduce"):
        if small:
            return Choice("minimum-spanning-tree")
        return Choice("linear-pipeline", min(-(-size_bytes // BLOCK_BYTES), MOST_BLOCKS))
    return Choice("ring")


def _inside(collective: Collective, ranks: int, size_bytes: int) -> Choice:
    small = size_bytes <= SMALL_SHARED_BYTES
    if collective == "all-reduce":
        return Choice("recursive-doubling" if small else "direct")
    if collective == "broadcast":
        return Choice("minimum-spanning-tree" if small and ranks > 2 else "direct")
    if collective == "reduce":
        return Choice("minimum-spanning-tree" if small or ranks <= FEW_RANKS else "direct")
    return Choice("direct")
