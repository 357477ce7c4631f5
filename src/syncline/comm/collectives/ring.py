"""Ring: every rank talks to its neighbours only and is always busy.

Source: Patarasuk and Yuan (2009); cost in MG-WFBP, Table 2.
"""

from __future__ import annotations

import numpy as np

from syncline.comm.collectives.minimum_spanning_tree import scatter
from syncline.comm.collectives.schedule import Transfers, in_turn


def all_reduce(ranks: int) -> Transfers:
    """Return the ring all-reduce: both collectives below."""
    return in_turn(reduce_scatter(ranks), all_gather(ranks))


def reduce_scatter(ranks: int) -> Transfers:
    """Return the reduce-scatter of a block a rank.

    For P - 1 steps each rank sends one block to the next rank, which adds its own. Block r sets out
    at rank r + 1, so that its sum is complete at rank r.
    """
    return _round(ranks, first_block=-1, reduces=True)


def all_gather(ranks: int) -> Transfers:
    """Return the all-gather of a block a rank: each sends on what it got last, first its own."""
    return _round(ranks, first_block=0, reduces=False)


def _round(ranks: int, *, first_block: int, reduces: bool) -> Transfers:
    rank = np.arange(ranks)
    step = np.arange(ranks - 1)[:, None]
    return Transfers.of(
        step=step,
        source=rank,
        destination=(rank + 1) % ranks,
        block_start=(rank + first_block - step) % ranks,
        reduces=reduces,
    )


def broadcast(ranks: int) -> Transfers:
    """Return the broadcast from rank 0: a tree scatter, then an all-gather round the ring.

    Source: Thakur, Rabenseifner and Gropp (2005), section 4. Its cost is what linear-pipeline's
    Table 1 prints for the bidirectional exchange.
    """
    return in_turn(scatter(np.arange(ranks)), all_gather(ranks))
