"""Scatter and ring: a broadcast of long messages, as MPI does it."""

from __future__ import annotations

import numpy as np

from syncline.collectives import ring
from syncline.collectives.minimum_spanning_tree import scatter
from syncline.collectives.transfers import Transfers, in_turn

__all__ = ["broadcast"]


def broadcast(ranks: int) -> Transfers:
    """Return the broadcast from rank 0: a tree scatter, then an all-gather round the ring.

    Cost for any P: (log2 P + P - 1) alpha + 2 (P - 1)/P beta M, the logarithm rounded up. It is
    what Table 1 prints for the bidirectional exchange.

    Args:
        ranks: P, at least 1.

    Source: Thakur, Rabenseifner and Gropp (2005), section 4; linear-pipeline, Table 1.
    """
    return in_turn(scatter(np.arange(ranks)), ring.all_gather(ranks))
