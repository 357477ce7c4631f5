"""Recursive halving: recursive doubling backwards; what a rank answers for halves in each step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.collectives.fold import fold
from syncline.collectives.recursive_doubling import doubling
from syncline.collectives.transfers import Transfers, in_turn

__all__ = ["halving", "reduce_scatter"]


def reduce_scatter(ranks: int) -> Transfers:
    """Return the reduce-scatter of a block a rank by recursive halving.

    Cost for P = 2^k: log2 P alpha + (P - 1)/P (beta M + gamma M). For other P, surplus ranks hand
    in their whole vectors first, and get their shards in the end.

    Args:
        ranks: P, at least 1.

    Source: Thakur, Rabenseifner and Gropp (2005), section 4; linear-pipeline, section 3.2 (BE).
    """
    folded = fold(ranks, ranks)
    exchanges = halving(folded.core, np.append(folded.core, ranks))
    return in_turn(folded.vectors_in, exchanges, folded.shards_out)


def halving(members: NDArray[np.int64], borders: NDArray[np.int64]) -> Transfers:
    """Return the reduce-scatter among a power of two of ranks.

    First each sends half of the vector to the one whose number differs in the highest bit, keeps
    the other half and adds what it gets; then a quarter, and so on, until it has the sum of its own
    blocks. Arguments as for :func:`~syncline.collectives.recursive_doubling.doubling`.
    """
    return doubling(members, borders).backwards(reduces=True)
