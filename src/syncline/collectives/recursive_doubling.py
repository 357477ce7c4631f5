"""Recursive doubling: the fewest steps, at the price of sending the whole vector in each."""

from __future__ import annotations

import numpy as np

from syncline.collectives.fold import fold
from syncline.collectives.schedule import Schedule, Transfers, require_ranks

__all__ = ["recursive_doubling"]


def recursive_doubling(ranks: int) -> Schedule:
    """Return the all-reduce by recursive doubling.

    In step k each rank exchanges its whole vector with the rank whose number differs in bit k, and
    both add what they get. Both compute the same sum of the same two values, and a sum of two does
    not depend on their order, so all ranks agree bit for bit. Cost for P = 2^k:
    log2 P (alpha + beta M + gamma M). Other P: see :func:`~syncline.collectives.fold.fold`.

    Args:
        ranks: P, at least 1.

    Source: Thakur, Rabenseifner and Gropp (2005), section 4; cost in MG-WFBP, Table 2.
    """
    require_ranks("recursive-doubling", ranks)
    folded = fold(ranks, 1)
    number = np.arange(len(folded.core))
    exchanges = [
        Transfers.of(
            step=folded.first_step + bit,
            source=folded.core,
            destination=folded.core[number ^ (1 << bit)],
            block_start=0,
            reduces=True,
        )
        for bit in range(folded.rounds)
    ]
    return Schedule.of(
        collective="all-reduce",
        algorithm="recursive-doubling",
        ranks=ranks,
        blocks=1,
        transfers=[
            folded.before,
            *exchanges,
            folded.after(folded.first_step + folded.rounds, 1),
        ],
    )
