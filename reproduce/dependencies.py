"""Which transfers of a schedule wait for which others, derived from their blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.comm.collectives.schedule import Schedule

__all__ = ["Dependencies", "Pairs", "dependencies", "rows_and_blocks"]

Rows = NDArray[np.int64]


class Pairs(NamedTuple):
    """Pairs of rows of a schedule: each of ``later`` waits for that of ``earlier``."""

    later: Rows
    earlier: Rows


class Dependencies(NamedTuple):
    """The order of transfers that replaces a barrier after every step.

    The result of a transfer: its blocks are copied or reduced at the receiver.
    """

    send_after_result: Pairs
    """A rank sends a block after the results of earlier receives of it."""
    result_after_send: Pairs
    """A rank changes a block after earlier sends of it."""
    result_after_result: Pairs
    """A rank changes a block in the order of its steps, which fixes the order of the sum. Omitted
    if sends between the two imply it."""


def rows_and_blocks(schedule: Schedule) -> tuple[Rows, Rows]:
    """Return each block of each transfer: the transfer's row and the block, row by row."""
    counts = (schedule.block_stop - schedule.block_start).astype(np.int64)
    row = np.repeat(np.arange(len(schedule)), counts)
    first = np.cumsum(counts) - counts
    return row, np.arange(len(row)) - (first - schedule.block_start)[row]


def dependencies(schedule: Schedule) -> Dependencies:
    """Return what each transfer of a schedule waits for.

    O(n log n) time and O(n) memory for n blocks in all transfers together.
    """
    row, block = rows_and_blocks(schedule)
    # Every block of every transfer is read at the sender and written at the receiver. Sorted by
    # rank, block and step, reads before writes in a step, neighbours are what depends.
    rank = np.concatenate([schedule.source[row], schedule.destination[row]]).astype(np.int64)
    place = rank * schedule.blocks + np.tile(block, 2)
    moment = 2 * np.tile(schedule.step[row].astype(np.int64), 2)
    moment[len(row) :] += 1
    order = np.argsort(place * (2 * schedule.steps) + moment, kind="stable")
    place = place[order]
    writes = order >= len(row)
    who = np.tile(row, 2)[order]

    at = np.arange(len(order))
    fresh = np.diff(place, prepend=-1) != 0
    group_start = np.maximum.accumulate(np.where(fresh, at, 0))
    last_write = np.maximum.accumulate(np.where(writes, at, -1))
    last_write = np.concatenate([[-1], last_write])[: len(order)]  # before, not at, each place
    has_write = last_write >= group_start

    reader = ~writes & has_write
    previous_is_write = np.concatenate([[False], writes])[: len(order)] & ~fresh
    rewriter = writes & previous_is_write

    # The next write after each read, in the same group.
    next_write = np.where(writes, at, len(order))
    next_write = np.minimum.accumulate(next_write[::-1])[::-1]
    group_stop = np.append(np.flatnonzero(fresh)[1:], len(order))[np.cumsum(fresh) - 1]
    sender = ~writes & (next_write < group_stop)

    several = bool((schedule.block_stop - schedule.block_start > 1).any())

    def pairs(later: Rows, earlier: Rows) -> Pairs:
        if not several:
            return Pairs(later, earlier)
        # Transfers that share several blocks would be listed once a block.
        key = np.unique(later * len(schedule) + earlier)
        return Pairs(key // len(schedule), key % len(schedule))

    return Dependencies(
        send_after_result=pairs(who[reader], who[last_write[reader]]),
        result_after_send=pairs(who[next_write[sender]], who[sender]),
        result_after_result=pairs(who[rewriter], who[last_write[rewriter]]),
    )
