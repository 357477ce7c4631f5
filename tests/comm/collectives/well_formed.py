"""Checks of the rows of a program: what every program must keep, whatever it computes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from reproduce.dependencies import rows_and_blocks

from syncline.comm.collectives.schedule import LARGEST_TRANSFERS, Schedule
from syncline.errors import UserError

__all__ = ["well_formed"]


def well_formed(schedule: Schedule) -> Schedule:
    """Return the program, whose rows make sense.

    Raises:
        UserError: there are too many blocks, transfers or steps, columns differ in length, rows are
            not sorted by step, a rank or a block does not exist, a rank sends to itself, or a rank
            would in one step write a block twice, or overwrite a block that it sends.
    """
    if not 1 <= schedule.blocks <= LARGEST_TRANSFERS:
        raise UserError(
            f"{schedule.name}: the vector must be cut into 1 to {LARGEST_TRANSFERS} blocks, "
            f"found {schedule.blocks}"
        )
    lengths = [len(column) for column in schedule.transfers()]
    if len(set(lengths)) != 1:
        raise UserError(f"{schedule.name}: the columns differ in length: {lengths}")
    if len(schedule) > LARGEST_TRANSFERS:
        raise UserError(
            f"{schedule.name}: {len(schedule)} transfers are more than {LARGEST_TRANSFERS}; "
            "use fewer ranks or blocks"
        )
    _require(schedule, schedule.step >= 0, "its step is negative")
    _require(schedule, np.diff(schedule.step, prepend=0) >= 0, "its step is before that of the row")
    for rank in (schedule.source, schedule.destination):
        _require(schedule, (rank >= 0) & (rank < schedule.ranks), "a rank does not exist")
    _require(schedule, schedule.source != schedule.destination, "a rank sends to itself")
    inside = (schedule.block_start >= 0) & (schedule.block_stop <= schedule.blocks)
    inside &= schedule.block_start < schedule.block_stop
    _require(schedule, inside, "its blocks do not exist")
    if schedule.steps * schedule.ranks * schedule.blocks >= 1 << 55:
        raise UserError(f"{schedule.name}: {schedule.steps} steps are too many; number them from 0")
    _require_independent_steps(schedule)
    return schedule


def _require(schedule: Schedule, holds: NDArray[np.bool_], otherwise: str) -> None:
    if not holds.all():
        row = int(np.argmin(holds))
        raise UserError(
            f"{schedule.name}: transfer {row} (step {schedule.step[row]}, rank "
            f"{schedule.source[row]} to {schedule.destination[row]}, blocks "
            f"{schedule.block_start[row]} to {schedule.block_stop[row]}): {otherwise}"
        )


def _require_independent_steps(schedule: Schedule) -> None:
    """Check that no step writes a block twice, or overwrites what the rank sends in it."""
    rows = np.arange(len(schedule))
    row, block = rows_and_blocks(schedule)
    step = schedule.step[row].astype(np.int64)
    written = (step * schedule.ranks + schedule.destination[row]) * schedule.blocks + block
    keys = np.sort(written)
    twice = keys[1:][np.diff(keys) == 0]
    clash = row[np.isin(written, twice)]
    _require(schedule, ~np.isin(rows, clash), "its receiver gets a block twice in a step")
    sent = (step * schedule.ranks + schedule.source[row]) * schedule.blocks + block
    lost = ~schedule.reduces[row] & np.isin(written, sent)
    _require(
        schedule,
        ~np.isin(rows, row[lost]),
        "its receiver overwrites what it sends in the step",
    )
