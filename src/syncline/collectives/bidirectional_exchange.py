"""Bidirectional exchange: trees at the root's end, pairs that exchange at the other."""

from __future__ import annotations

import numpy as np

from syncline.collectives.halving_doubling import doubling, fold, folded_blocks, halving
from syncline.collectives.minimum_spanning_tree import scatter
from syncline.collectives.transfers import Transfers, in_turn

__all__ = ["broadcast", "reduce"]


def broadcast(ranks: int) -> Transfers:
    """Return the broadcast from rank 0: a tree scatter, then an all-gather by doubling.

    Cost for P = 2^k: 2 log2 P alpha + 2 (P - 1)/P beta M. For other P, surplus ranks get the vector
    at the end, for alpha + beta M. Table 1 prints ``(log p + p - 1) alpha``, which is that of
    :mod:`~syncline.collectives.ring`.

    Source: linear-pipeline, section 3.2 and Table 1 (BE).
    """
    blocks = folded_blocks(ranks)
    folded = fold(ranks, blocks)
    gathered = doubling(folded.core, np.arange(blocks + 1))
    return in_turn(scatter(folded.core), gathered, folded.vectors_out)


def reduce(ranks: int) -> Transfers:
    """Return the reduction to rank 0: a reduce-scatter by halving, then a tree gather.

    Cost for P = 2^k: 2 log2 P alpha + 2 (P - 1)/P beta M + (P - 1)/P gamma M. For other P, surplus
    ranks hand in their vectors first, for alpha + beta M + gamma M.

    Source: linear-pipeline, section 3.2 and Table 1 (BE).
    """
    blocks = folded_blocks(ranks)
    folded = fold(ranks, blocks)
    halved = halving(folded.core, np.arange(blocks + 1))
    return in_turn(folded.vectors_in, halved, scatter(folded.core).backwards(reduces=False))
