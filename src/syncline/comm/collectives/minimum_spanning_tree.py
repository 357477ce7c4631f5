"""Minimum spanning tree: a binomial tree; each step doubles the ranks that have the vector.

Source: linear-pipeline, section 3.2 and Table 1 (MST).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.comm.collectives.schedule import Transfers, in_turn, together


def broadcast(ranks: int) -> Transfers:
    """Return the broadcast of one block from rank 0.

    In each step every rank that has the vector sends it to one that has not: first to rank
    2^(k-1), then from both to those 2^(k-2) further on, and so on.
    """
    whole = np.zeros(ranks, dtype=np.int64)
    return _down(np.arange(ranks), whole, whole + 1)


def reduce(ranks: int) -> Transfers:
    """Return the reduction of one block to rank 0: :func:`broadcast` backwards."""
    return broadcast(ranks).backwards(reduces=True)


def all_reduce(ranks: int) -> Transfers:
    """Return the all-reduce of one block: up the tree, then down again.

    MG-WFBP's Table 2 calls this a binary tree. A tree in which every rank has two children would
    take longer than that row says: a parent would receive from one child after the other.
    """
    return in_turn(reduce(ranks), broadcast(ranks))


def scatter(members: NDArray[np.int64]) -> Transfers:
    """Return the scatter of one block a member: the nth to the nth, all from the first member.

    A member, one of the ranks in an array of shape ``(P,)``, gets the blocks of all below it in the
    tree. Backwards it is a gather (Chan et al., 2007).
    """
    number = np.arange(len(members))
    lowest_bit = number & -number
    return _down(members, number, np.minimum(number + lowest_bit, len(members)))


def _down(
    members: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64]
) -> Transfers:
    """Send blocks down the tree; member n gets those from ``start[n]`` to before ``stop[n]``."""
    rounds = (len(members) - 1).bit_length()
    levels = []
    for bit in reversed(range(rounds)):
        child = np.arange(1 << bit, len(members), 2 << bit)
        levels.append(
            Transfers.of(
                step=rounds - 1 - bit,
                source=members[child - (1 << bit)],
                destination=members[child],
                block_start=start[child],
                block_stop=stop[child],
                reduces=False,
            )
        )
    return together(*levels)
