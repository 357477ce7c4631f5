"""Direct: every rank gets each block directly from the rank that has it, as in shared memory."""

from __future__ import annotations

import numpy as np

from syncline.comm.collectives.schedule import Transfers, in_turn


def all_gather(ranks: int) -> Transfers:
    """Return the all-gather of a block a rank: in each step from another peer.

    In step s rank r reads from rank r + 1 + s, so that no two read from the same rank at once. If a
    rank sends and receives one block at a time, that costs what a ring does. But no transfer needs
    another one's result, so in shared memory all may run at once.
    """
    rank = np.arange(ranks)
    step = np.arange(ranks - 1)[:, None]
    owner = (rank + 1 + step) % ranks
    return Transfers.of(step=step, source=owner, destination=rank, block_start=owner, reduces=False)


def reduce_scatter(ranks: int) -> Transfers:
    """Return the reduce-scatter of a block a rank: :func:`all_gather` backwards."""
    return all_gather(ranks).backwards(reduces=True)


def all_reduce(ranks: int) -> Transfers:
    """Return the all-reduce: each rank adds up one block, then all read all sums.

    If every rank added up whole vectors, each would begin with its own, and they would differ in
    the last bit.
    """
    return in_turn(reduce_scatter(ranks), all_gather(ranks))


def broadcast(ranks: int) -> Transfers:
    """Return the broadcast of one block: every rank reads from rank 0."""
    peer = np.arange(1, ranks)
    return Transfers.of(step=peer - 1, source=0, destination=peer, block_start=0, reduces=False)


def reduce(ranks: int) -> Transfers:
    """Return the reduction to rank 0: each rank adds up one block, then rank 0 reads all sums."""
    owner = np.arange(1, ranks)
    gather = Transfers.of(
        step=owner - 1, source=owner, destination=0, block_start=owner, reduces=False
    )
    return in_turn(reduce_scatter(ranks), gather)
