"""Linear pipeline: blocks flow along a chain, filled once for reduction and broadcast.

Source: linear-pipeline, section 3 and Fig. 2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.comm.collectives.schedule import Transfers, together


def broadcast(ranks: int, blocks: int) -> Transfers:
    """Return the broadcast from rank 0: block after block goes down the chain 0, 1, ... P - 1."""
    return _chain(np.arange(ranks), blocks, reduces=False)


def reduce(ranks: int, blocks: int) -> Transfers:
    """Return the reduction to rank 0: blocks are added up down the chain 1, 2, ... P - 1, 0."""
    return _chain(np.roll(np.arange(ranks), -1), blocks, reduces=True)


def all_reduce(ranks: int, blocks: int) -> Transfers:
    """Return the all-reduce, which fills the pipe once.

    Block after block goes down the chain 0, 1, ... P - 1 and is added up on its way; the last rank
    has the sums. They go on in the same direction: from the last rank to rank 0, and down the chain
    again as soon as rank 0 has sent all its own blocks. Unlike Fig. 2c, the last sum is not sent to
    the rank that formed it.
    """
    rank = np.arange(ranks)
    again = max(ranks, blocks)  # rank 0 has sent its own blocks, and the first sum has come
    return together(
        _chain(rank, blocks, reduces=True),
        _chain(rank[[-1, 0]], blocks, reduces=False, first_step=ranks - 1),
        _chain(rank[:-1], blocks, reduces=False, first_step=again),
    )


def one_way_steps(ranks: int, blocks: int) -> int:
    """Return the steps of :func:`broadcast` and :func:`reduce`; the paper prints one more."""
    return ranks - 2 + blocks


def all_reduce_steps(ranks: int, blocks: int) -> int:
    """Return the steps of :func:`all_reduce`: 2 B + P - 3 once there are P blocks or more."""
    if ranks == 2:
        return blocks + 1
    return max(ranks, blocks) + blocks + ranks - 3


def _chain(
    order: NDArray[np.int64], blocks: int, *, reduces: bool, first_step: int = 0
) -> Transfers:
    """Send block after block from the first of some ranks to the last, each a step behind."""
    hop = np.arange(len(order) - 1)[:, None]
    block = np.arange(blocks)
    return Transfers.of(
        step=first_step + hop + block,
        source=order[hop],
        destination=order[hop + 1],
        block_start=block,
        reduces=reduces,
    )
