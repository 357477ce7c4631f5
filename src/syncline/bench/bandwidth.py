"""Bandwidths of a collective, derived from its time as nccl-tests does."""

from __future__ import annotations

from syncline.collectives import Collective

__all__ = ["ELEMENT_BYTES", "bus_factor", "whole_size"]

ELEMENT_BYTES = 4
"""All contestants exchange 32-bit floating point."""


def bus_factor(collective: Collective, workers: int) -> float:
    """Return the bus bandwidth over the algorithm bandwidth (size over time).

    It is how many times the vector at least the busiest link direction of a rank carries, so the
    bus bandwidth can be compared with the speed of the hardware, whatever the number of ranks.

    Source: nccl-tests, PERFORMANCE.md.
    """
    if collective == "all-reduce":
        return 2 * (workers - 1) / workers
    if collective in ("reduce-scatter", "all-gather"):
        return (workers - 1) / workers
    return 1.0


def whole_size(collective: Collective, workers: int, size_bytes: int) -> int:
    """Return the smallest size of at least ``size_bytes`` that a collective can have.

    The vector holds whole elements, and where every rank has a shard of it, equal shards.
    """
    shards = workers if collective in ("reduce-scatter", "all-gather") else 1
    unit = ELEMENT_BYTES * shards
    return -(-size_bytes // unit) * unit
