"""A tiny event simulator in plain Python, to hold the native one against."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def simulate(
    lanes: Sequence[tuple[int, bool]],
    contentions: Sequence[tuple[int, int, Fraction]],
    task_lanes: Sequence[int],
    durations: Sequence[int],
    before: Sequence[Sequence[int]],
) -> tuple[list[Fraction], list[Fraction]] | None:
    """Return the start and stop of every task, or None if some never start.

    Instant by instant: first everything that is done stops, then whatever may start does, in the
    lane's order or the lowest index first. Work left is exact, in fractions.
    """
    count = len(durations)
    start: list[Fraction | None] = [None] * count
    stop: list[Fraction | None] = [None] * count
    left = [Fraction(duration) for duration in durations]
    now = Fraction(0)
    while True:
        moved = True
        while moved:
            moved = False
            running = [i for i in range(count) if start[i] is not None and stop[i] is None]
            for task in running:
                if left[task] == 0:
                    stop[task] = now
                    moved = True
            running = [i for i in running if stop[i] is None]
            for lane, (capacity, in_order) in enumerate(lanes):
                for task in (i for i in range(count) if task_lanes[i] == lane):
                    if start[task] is not None:
                        continue
                    busy = sum(task_lanes[i] == lane for i in running)
                    ready = all(stop[b] is not None for b in before[task])
                    if busy < capacity and ready:
                        start[task] = now
                        running.append(task)
                        moved = True
                    elif in_order or busy >= capacity:
                        break
        if not running:
            break
        busy_lanes = {task_lanes[i] for i in running}
        speed = {}
        for lane in busy_lanes:
            pairs = [(a, b, s) for a, b, s in contentions if lane in (a, b)]
            met = [s for a, b, s in pairs if (b if lane == a else a) in busy_lanes]
            speed[lane] = 1 / max(met, default=Fraction(1))
        step = min(left[i] / speed[task_lanes[i]] for i in running)
        now += step
        for task in running:
            left[task] -= step * speed[task_lanes[task]]
    if any(time is None for time in stop):
        return None
    return [t for t in start if t is not None], [t for t in stop if t is not None]
