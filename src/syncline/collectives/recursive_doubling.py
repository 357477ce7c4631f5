"""Recursive doubling: the fewest steps; what a rank has doubles in each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.collectives.fold import fold
from syncline.collectives.transfers import Transfers, in_turn, together

__all__ = ["all_gather", "all_reduce", "doubling"]


def all_reduce(ranks: int) -> Transfers:
    """Return the all-reduce of one block by recursive doubling.

    In step k each rank exchanges its whole vector with the rank whose number differs in bit k, and
    both add what they get. Both compute the same sum of the same two values, and a sum of two does
    not depend on their order, so all ranks agree bit for bit. Cost for P = 2^k:
    log2 P (alpha + beta M + gamma M). Other P: see :func:`~syncline.collectives.fold.fold`.

    Args:
        ranks: P, at least 1.

    Source: Thakur, Rabenseifner and Gropp (2005), section 4; cost in MG-WFBP, Table 2.
    """
    folded = fold(ranks, 1)
    number = np.arange(len(folded.core))
    exchanges = [
        Transfers.of(
            step=bit,
            source=folded.core,
            destination=folded.core[number ^ (1 << bit)],
            block_start=0,
            reduces=True,
        )
        for bit in range(_log2(len(number)))
    ]
    return in_turn(folded.vectors_in, together(*exchanges), folded.vectors_out)


def all_gather(ranks: int) -> Transfers:
    """Return the all-gather of a block a rank by recursive doubling.

    Cost for P = 2^k: log2 P alpha + (P - 1)/P beta M. For other P, surplus ranks hand in their
    shards first, and get all of them in the end.

    Args:
        ranks: P, at least 1.

    Source: Thakur, Rabenseifner and Gropp (2005), section 4; linear-pipeline, section 3.2 (BE).
    """
    folded = fold(ranks, ranks)
    exchanges = doubling(folded.core, np.append(folded.core, ranks))
    return in_turn(folded.shards_in, exchanges, folded.vectors_out)


def doubling(members: NDArray[np.int64], borders: NDArray[np.int64]) -> Transfers:
    """Return the all-gather among a power of two of ranks.

    In step k each exchanges all that it has with the one whose number differs in bit k.

    Args:
        members: the ranks, by number; shape ``(P,)``.
        borders: member n begins with the blocks ``borders[n]`` to before ``borders[n + 1]``; shape
            ``(P + 1,)``.
    """
    number = np.arange(len(members))
    steps = []
    for bit in range(_log2(len(members))):
        first = number >> bit << bit
        steps.append(
            Transfers.of(
                step=bit,
                source=members,
                destination=members[number ^ (1 << bit)],
                block_start=borders[first],
                block_stop=borders[first + (1 << bit)],
                reduces=False,
            )
        )
    return together(*steps)


def _log2(power: int) -> int:
    return power.bit_length() - 1
