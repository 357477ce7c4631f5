"""``Transfers``: who sends which blocks to whom, in arrays, and how to combine such parts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Indices = NDArray[np.int32]
"""Shape ``(transfers,)``."""
Flags = NDArray[np.bool_]
"""Shape ``(transfers,)``."""


class Transfers(NamedTuple):
    """Some of a schedule's transfers, column by column; each column of one length."""

    step: Indices
    """When, counted from 0."""
    source: Indices
    destination: Indices
    block_start: Indices
    block_stop: Indices
    """The block after the last."""
    reduces: Flags
    """Whether the receiver adds the blocks to its own; otherwise they replace them."""

    @classmethod
    def of(
        cls,
        *,
        step: ArrayLike,
        source: ArrayLike,
        destination: ArrayLike,
        block_start: ArrayLike,
        block_stop: ArrayLike | None = None,
        reduces: bool,
    ) -> Transfers:
        """Return transfers from columns of shapes that broadcast together.

        Without ``block_stop`` they are of a single block.
        """
        start = np.asarray(block_start)
        stop = start + 1 if block_stop is None else np.asarray(block_stop)
        columns = np.broadcast_arrays(step, source, destination, start, stop)
        listed = [column.astype(np.int32).ravel() for column in columns]
        return cls._make([*listed, np.full(len(listed[0]), reduces)])

    @property
    def steps(self) -> int:
        """How many steps there are, up to the last one used."""
        return int(self.step.max(initial=-1)) + 1

    def backwards(self, *, reduces: bool) -> Transfers:
        """Return these in reverse: the last step first, from receivers to senders.

        So an all-gather becomes a reduce-scatter, a broadcast a reduce, and a scatter a gather.
        """
        return self._replace(
            step=self.steps - 1 - self.step,
            source=self.destination,
            destination=self.source,
            reduces=np.full_like(self.reduces, reduces),
        )

    def where(self, chosen: Flags | NDArray[np.int64]) -> Transfers:
        """Return those that are chosen, or all in another order."""
        return Transfers._make(column[chosen] for column in self)

    def in_order(self) -> Transfers:
        """Return these sorted by step."""
        return self.where(np.argsort(self.step, kind="stable"))

    def moved(self, ranks: ArrayLike, *, first_block: int = 0, stride: int = 1) -> Transfers:
        """Return these between other ranks, over other blocks of a longer vector.

        Args:
            ranks: who does what rank 0, 1, 2 ... did.
            first_block: where block 0 goes.
            stride: how many blocks each block becomes.
        """
        number = np.asarray(ranks, dtype=np.int32)
        return self._replace(
            source=number[self.source],
            destination=number[self.destination],
            block_start=self.block_start * stride + first_block,
            block_stop=self.block_stop * stride + first_block,
        )


def together(*parts: Transfers) -> Transfers:
    """Return the transfers of all parts, in the steps that they have."""
    none = Transfers.of(step=[], source=[], destination=[], block_start=[], reduces=False)
    return Transfers(*(np.concatenate(columns) for columns in zip(none, *parts, strict=True)))


def in_turn(*parts: Transfers) -> Transfers:
    """Return the transfers of all parts, one part after the other."""
    moved, steps = [], 0
    for part in parts:
        moved.append(part._replace(step=part.step + steps))
        steps += part.steps
    return together(*moved)
