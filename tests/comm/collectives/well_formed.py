"""Checks of the rows of a program: what every program must keep, whatever it computes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from reproduce.dependencies import rows_and_blocks

from syncline.comm.collectives.schedule import Schedule
from syncline.errors import UserError


def well_formed(schedule: Schedule) -> Schedule:
    """Return the program, whose rows make sense.

    Raise UserError if rows are not sorted by step, a rank or block does not exist, a rank sends to
    itself, or a rank would in one step write a block twice, or overwrite a block that it sends.
    """
    _require(schedule, schedule.step >= 0, "its step is negative")
    _require(schedule, np.diff(schedule.step, prepend=0) >= 0, "its step is before that of the row")
    for rank in (schedule.source, schedule.destination):
        _require(schedule, (rank >= 0) & (rank < schedule.ranks), "a rank does not exist")
    _require(schedule, schedule.source != schedule.destination, "a rank sends to itself")
    inside = (schedule.block_start >= 0) & (schedule.block_stop <= schedule.blocks)
    inside &= schedule.block_start < schedule.block_stop
    _require(schedule, inside, "its blocks do not exist")
    row, block = rows_and_blocks(schedule)
    step = schedule.step[row].astype(np.int64)
    written = (step * schedule.ranks + schedule.destination[row]) * schedule.blocks + block
    keys, times = np.unique(written, return_counts=True)
    twice = np.isin(written, keys[times > 1])
    _require(schedule, _none_of(schedule, row[twice]), "its receiver gets a block twice in a step")
    sent = (step * schedule.ranks + schedule.source[row]) * schedule.blocks + block
    lost = ~schedule.reduces[row] & np.isin(written, sent)
    _require(schedule, _none_of(schedule, row[lost]), "its receiver overwrites what it sends")
    return schedule


def _none_of(schedule: Schedule, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    return ~np.isin(np.arange(len(schedule)), rows)


def _require(schedule: Schedule, holds: NDArray[np.bool_], otherwise: str) -> None:
    if not holds.all():
        row = int(np.argmin(holds))
        raise UserError(
            f"{schedule.name}: transfer {row} (step {schedule.step[row]}, rank "
            f"{schedule.source[row]} to {schedule.destination[row]}): {otherwise}"
        )
