"""Binary tree: a reduction up a tree to rank 0, then a broadcast down the same tree."""

from __future__ import annotations

import numpy as np

from syncline.collectives.schedule import Schedule, Transfers, require_ranks

__all__ = ["binary_tree"]


def binary_tree(ranks: int) -> Schedule:
    """Return the all-reduce over a binomial tree, for any number of ranks.

    In step k of the reduction, the ranks whose lowest set bit is k send their whole vector to the
    rank without that bit; the broadcast is the same in reverse. Cost for P = 2^k:
    log2 P (2 alpha + 2 beta M + gamma M); for other P the logarithm is rounded up.

    MG-WFBP's Table 2 calls this a binary tree, linear-pipeline's Table 1 a minimal spanning tree
    (MST). A tree in which every rank has two children would take longer than the row says: a parent
    would receive from one child after the other at every level.

    Args:
        ranks: P, at least 1.

    Source: MG-WFBP, Table 2, row 1.
    """
    require_ranks("binary-tree", ranks)
    rounds = (ranks - 1).bit_length()
    transfers = []
    for bit in range(rounds):
        child = np.arange(1 << bit, ranks, 2 << bit)
        parent = child - (1 << bit)
        transfers.append(
            Transfers.of(step=bit, source=child, destination=parent, block_start=0, reduces=True)
        )
        transfers.append(
            Transfers.of(
                step=2 * rounds - 1 - bit,
                source=parent,
                destination=child,
                block_start=0,
                reduces=False,
            )
        )
    return Schedule.of(
        collective="all-reduce",
        algorithm="binary-tree",
        ranks=ranks,
        blocks=1,
        transfers=transfers,
    )
