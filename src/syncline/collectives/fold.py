"""Worker counts that are no power of two, for algorithms that pair ranks by bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.collectives.schedule import Transfers

__all__ = ["Fold", "fold"]


class Fold(NamedTuple):
    """The ranks that take part, and how the others hand in their vectors and get the sums."""

    core: NDArray[np.int64]
    """The ranks that exchange, a power of two of them."""
    rounds: int
    """Base-2 logarithm of their number."""
    before: Transfers
    """Step 0 where there are others, else nothing."""
    first_step: int
    """The first step of the exchange: 1 where there are others, else 0."""
    others: NDArray[np.int64]
    """Ranks that do not exchange."""

    def after(self, step: int, blocks: int) -> Transfers:
        """Return the transfers of the sums to the other ranks, in a given step."""
        return Transfers.of(
            step=step,
            source=self.others - 1,
            destination=self.others,
            block_start=0,
            block_stop=blocks,
            reduces=False,
        )


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
    rounds = ranks.bit_length() - 1
    remainder = ranks - (1 << rounds)
    others = np.arange(1, 2 * remainder, 2)
    return Fold(
        core=np.setdiff1d(np.arange(ranks), others),
        rounds=rounds,
        before=Transfers.of(
            step=0,
            source=others,
            destination=others - 1,
            block_start=0,
            block_stop=blocks,
            reduces=True,
        ),
        first_step=1 if remainder else 0,
        others=others,
    )
