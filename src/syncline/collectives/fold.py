"""Worker counts that are no power of two, for algorithms that pair ranks by bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.collectives.transfers import Transfers

__all__ = ["Fold", "fold", "folded_blocks"]


class Fold(NamedTuple):
    """The ranks that take part, and how the others hand in what they have and get what they need.

    Each part is one step where there are others, else nothing.
    """

    core: NDArray[np.int64]
    """The ranks that exchange, a power of two of them. Where every rank has a shard, rank
    ``core[n]`` speaks for the shards from ``core[n]`` to before ``core[n + 1]``."""
    vectors_in: Transfers
    """The other ranks' whole vectors, to be added."""
    vectors_out: Transfers
    """Whole results to the other ranks."""
    shards_in: Transfers
    """The other ranks' shards, one block a rank."""
    shards_out: Transfers
    """Results of the other ranks' shards."""


def fold(ranks: int, blocks: int) -> Fold:
    """Reduce any number of ranks to a power of two.

    With P = 2^k + r, the odd ones of the first 2 r ranks send their whole vector to the rank before
    them and get the sums at the end. That costs 2 (alpha + beta M) + gamma M more than 2^k ranks.
    The partner is a neighbour, so that it is often on the same host.

    Args:
        ranks: P, at least 1.
        blocks: how many blocks the vector has.

    Source: Rabenseifner (2004), section 3.
    """
    remainder = ranks - folded_blocks(ranks)
    others = np.arange(1, 2 * remainder, 2)

    def hand_in(first: NDArray[np.int64] | int, stop: NDArray[np.int64] | int) -> Transfers:
        return Transfers.of(
            step=0,
            source=others,
            destination=others - 1,
            block_start=first,
            block_stop=stop,
            reduces=False,
        )

    vectors, shards = hand_in(0, blocks), hand_in(others, others + 1)
    return Fold(
        core=np.setdiff1d(np.arange(ranks), others),
        vectors_in=vectors._replace(reduces=~vectors.reduces),
        vectors_out=vectors.backwards(reduces=False),
        shards_in=shards,
        shards_out=shards.backwards(reduces=False),
    )


def folded_blocks(ranks: int) -> int:
    """Return how many ranks are left, and so into how many blocks to cut: a power of two."""
    return 1 << (ranks.bit_length() - 1)
