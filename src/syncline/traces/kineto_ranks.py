"""Traces of several ranks side by side: one clock, and what messages cost without waiting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from syncline.errors import MismatchError
from syncline.model.network import Measurement
from syncline.model.quantities import NS_PER_S
from syncline.traces.kineto_events import KinetoEvents
from syncline.traces.kineto_tasks import StepTasks

__all__ = ["RankSteps", "alignment_ns", "measured_messages", "rank_numbers"]


RankSteps = Sequence[tuple[KinetoEvents, list[StepTasks]]]
"""What each file holds."""


def rank_numbers(files: RankSteps) -> list[int]:
    """Return the rank of each file; its place where it does not say.

    Raises:
        MismatchError: two files are of one rank.
    """
    ranks: list[int] = []
    for place, (events, _) in enumerate(files):
        rank = place if events.rank is None else events.rank
        if rank in ranks:
            first = files[ranks.index(rank)][0].source
            raise MismatchError(
                f"{events.source}: rank {rank}, as {first}; give one trace for each rank"
            )
        ranks.append(rank)
    return ranks


def alignment_ns(files: RankSteps, notes: list[str]) -> list[list[int]]:
    """Return how much later than the first rank to begin each rank began each step, in ns."""
    offsets = [0]
    first = _ends(files[0][1])
    for events, steps in files[1:]:
        ends = _ends(steps)
        common = [ends[key] - first[key] for key in ends.keys() & first.keys()]
        if not common:
            notes.append(f"{events.source}: shares no message with the first; clocks not aligned")
        offsets.append(round(statistics.median(common)) if common else 0)
    begins: dict[int, int] = {}
    for (_, steps), offset in zip(files, offsets, strict=True):
        for tasks in steps:
            start = tasks.start_ns - offset
            begins[tasks.number] = min(start, begins.get(tasks.number, start))
    return [
        [tasks.start_ns - offset - begins[tasks.number] for tasks in steps]
        for (_, steps), offset in zip(files, offsets, strict=True)
    ]


def _ends(steps: Sequence[StepTasks]) -> dict[tuple[int, int], int]:
    return {
        (tasks.number, index): collective.stop_ns
        for tasks in steps
        for index, collective in enumerate(tasks.collectives)
    }


def measured_messages(files: RankSteps, notes: list[str]) -> tuple[Measurement, ...]:
    """Return what messages of each size take at most.

    Every measured duration is the true one and waiting, and no message is faster than a smaller
    one: so the shortest duration of this size or any larger one is an upper bound on the cost.
    """
    shortest: dict[tuple[int, int], tuple[int, int]] = {}  # by message: bytes, ns over ranks
    for _, steps in files:
        for tasks in steps:
            for index, collective in enumerate(tasks.collectives):
                size = collective.size_bytes
                spent = collective.stop_ns - collective.start_ns
                if size and spent > 0:
                    key = (tasks.number, index)
                    before = shortest.get(key)
                    shortest[key] = (size, spent if before is None else min(before[1], spent))
    by_size: dict[int, list[int]] = {}
    for size, spent in shortest.values():
        by_size.setdefault(size, []).append(spent)
    if by_size and len(files) == 1:
        notes.append(
            "the trace of one rank only: a message's duration includes waiting for the other "
            "ranks, so its cost is taken as the shortest over the steps; give the traces of all "
            "ranks for the true cost"
        )
    points: list[Measurement] = []
    least = math.inf
    for size, times in sorted(by_size.items(), reverse=True):
        least = min(least, *times)
        points.append(Measurement(size_bytes=size, time_s=least / NS_PER_S, repetitions=len(times)))
    return tuple(reversed(points))
