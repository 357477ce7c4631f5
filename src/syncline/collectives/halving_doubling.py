"""Recursive halving and doubling: few steps and the least bytes, for powers of two."""

from __future__ import annotations

import numpy as np

from syncline.collectives.fold import fold
from syncline.collectives.schedule import Schedule, Transfers, require_ranks

__all__ = ["halving_doubling"]


def halving_doubling(ranks: int) -> Schedule:
    """Return Rabenseifner's all-reduce: a reduce-scatter by halving, an all-gather by doubling.

    The vector has a block a rank. First each rank sends half of the blocks it is responsible for to
    the rank whose number differs in the highest bit, keeps the other half and adds what it gets;
    then a quarter, and so on, until it has the sum of one block. Then the steps run backwards with
    sums. Cost for P = 2^k: 2 alpha log2 P + 2 (P - 1)/P beta M + (P - 1)/P gamma M. Other P: see
    :func:`~syncline.collectives.fold.fold`.

    Args:
        ranks: P, at least 1.

    Source: Rabenseifner (2004); cost in MG-WFBP, Table 2.
    """
    require_ranks("halving-doubling", ranks)
    blocks = 1 << (ranks.bit_length() - 1)
    folded = fold(ranks, blocks)
    number = np.arange(blocks)
    exchanges = []
    for round_ in range(folded.rounds):
        half = blocks >> (round_ + 1)
        partner = number ^ half
        # A rank is left with the blocks whose upper bits are its own; it sends its partner's.
        theirs = partner // half * half
        exchanges.append(
            Transfers.of(
                step=folded.first_step + round_,
                source=folded.core,
                destination=folded.core[partner],
                block_start=theirs,
                block_stop=theirs + half,
                reduces=True,
            )
        )
        ours = number // half * half
        exchanges.append(
            Transfers.of(
                step=folded.first_step + 2 * folded.rounds - 1 - round_,
                source=folded.core,
                destination=folded.core[partner],
                block_start=ours,
                block_stop=ours + half,
                reduces=False,
            )
        )
    return Schedule.of(
        collective="all-reduce",
        algorithm="halving-doubling",
        ranks=ranks,
        blocks=blocks,
        transfers=[
            folded.before,
            *exchanges,
            folded.after(folded.first_step + 2 * folded.rounds, blocks),
        ],
    )
