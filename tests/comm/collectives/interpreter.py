"""A plain interpreter of schedules: step by step, as the definition says, on any kind of value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from syncline.comm.collectives.schedule import Schedule

V = TypeVar("V")


def run(schedule: Schedule, blocks: list[list[V]], add: Callable[[V, V], V]) -> list[list[V]]:
    """Return what every rank holds at the end, of the ``blocks`` that it has at the start.

    ``add`` reduces what a rank has and what it received.
    """
    held = [list(row) for row in blocks]
    for step in range(schedule.steps):
        rows = np.flatnonzero(schedule.step == step)
        sent = [
            held[schedule.source[i]][schedule.block_start[i] : schedule.block_stop[i]] for i in rows
        ]
        for i, values in zip(rows, sent, strict=True):
            receiver = held[schedule.destination[i]]
            for block, value in enumerate(values, start=int(schedule.block_start[i])):
                own = receiver[block]
                receiver[block] = add(own, value) if schedule.reduces[i] else value
    return held


def run_arrays(schedule: Schedule, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return every rank's vector at the end; both of shape ``(ranks, elements)``."""
    cuts = schedule.block_offsets(vectors.shape[1])[1:-1]
    blocks = [np.split(vector, cuts) for vector in vectors]
    return np.array([np.concatenate(row) for row in run(schedule, blocks, np.add)])
