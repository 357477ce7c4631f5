"""Ring all-reduce: every rank talks to its neighbours only and is always busy."""

from __future__ import annotations

import numpy as np

from syncline.collectives.schedule import Schedule, Transfers, require_ranks

__all__ = ["ring"]


def ring(ranks: int) -> Schedule:
    """Return the ring all-reduce for any number of ranks.

    The vector has a block a rank. For P - 1 steps each rank sends one block to the next rank, which
    adds its own; then every rank has the sum of one block. For another P - 1 steps the sums go
    round. Cost: 2 (P - 1) alpha + 2 (P - 1)/P beta M + (P - 1)/P gamma M.

    Args:
        ranks: P, at least 1.

    Source: Patarasuk and Yuan (2009); cost in MG-WFBP, Table 2.
    """
    require_ranks("ring", ranks)
    rank = np.arange(ranks)
    step = np.arange(ranks - 1)[:, None]
    after = (rank + 1) % ranks
    # Rank r first sends its block r; after P - 1 steps the sum of block r + 1 is complete at r.
    reduce_scatter = Transfers.of(
        step=step,
        source=rank,
        destination=after,
        block_start=(rank - step) % ranks,
        reduces=True,
    )
    all_gather = Transfers.of(
        step=step + ranks - 1,
        source=rank,
        destination=after,
        block_start=(rank + 1 - step) % ranks,
        reduces=False,
    )
    return Schedule.of(
        collective="all-reduce",
        algorithm="ring",
        ranks=ranks,
        blocks=ranks,
        transfers=[reduce_scatter, all_gather],
    )
