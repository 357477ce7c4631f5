"""Recursive halving and doubling: few steps and the least bytes, for powers of two."""

from __future__ import annotations

import numpy as np

from syncline.collectives.fold import fold, folded_blocks
from syncline.collectives.recursive_doubling import doubling
from syncline.collectives.recursive_halving import halving
from syncline.collectives.transfers import Transfers, in_turn

__all__ = ["all_reduce"]


def all_reduce(ranks: int) -> Transfers:
    """Return Rabenseifner's all-reduce: a reduce-scatter by halving, an all-gather by doubling.

    The vector has a block for each of the 2^k ranks that exchange. Cost for P = 2^k:
    2 alpha log2 P + 2 (P - 1)/P beta M + (P - 1)/P gamma M. Other P: see
    :func:`~syncline.collectives.fold.fold`. linear-pipeline's Table 1 calls this bidirectional
    exchange (BE).

    Args:
        ranks: P, at least 1.

    Source: Rabenseifner (2004); cost in MG-WFBP, Table 2.
    """
    blocks = folded_blocks(ranks)
    folded = fold(ranks, blocks)
    borders = np.arange(blocks + 1)
    return in_turn(
        folded.vectors_in,
        halving(folded.core, borders),
        doubling(folded.core, borders),
        folded.vectors_out,
    )
