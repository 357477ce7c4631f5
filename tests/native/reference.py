"""A tiny event simulator in plain Python, to hold the native one against."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def simulate(
    lanes: Sequence[tuple[int, bool]],
    contentions: Sequence[tuple[int, int, Fraction, Fraction]],
    task_lanes: Sequence[int],
    durations: Sequence[int],
    before: Sequence[Sequence[int]],
    extra: Sequence[Sequence[int]] | None = None,
    stages: Sequence[Fraction] = (),
    uses: Sequence[tuple[int, int, Fraction]] = (),
) -> tuple[list[Fraction], list[Fraction]] | None:
    """Return the start and stop of every task, or None if some never start.

    Instant by instant: first everything that is done stops, then whatever may start does, in the
    lane's order or the lowest index first. Work left is exact, in fractions. A capacity of 0 is
    unlimited; ``extra`` are the lanes that each task holds beside its own; a use is
    (task, stage, share).
    """
    count = len(durations)
    held = [[task_lanes[i], *(extra[i] if extra else ())] for i in range(count)]
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
            blocked = set()  # in-order lanes whose next task cannot start
            for task in (i for i in range(count) if start[i] is None):
                ready = all(stop[b] is not None for b in before[task])
                room = all(
                    not lanes[lane][0] or sum(lane in held[i] for i in running) < lanes[lane][0]
                    for lane in held[task]
                )
                if ready and room and task_lanes[task] not in blocked:
                    start[task] = now
                    running.append(task)
                    moved = True
                elif lanes[task_lanes[task]][1]:
                    blocked.add(task_lanes[task])
        if not running:
            break
        busy_lanes = {task_lanes[i] for i in running}
        lane_speed = {}
        for lane in busy_lanes:
            both = [(a, b, s) for a, b, s, _ in contentions] + [
                (b, a, s) for a, b, _, s in contentions
            ]
            met = [s for slowed, by, s in both if slowed == lane and by in busy_lanes]
            lane_speed[lane] = 1 / max(met, default=Fraction(1))
        speed = {i: lane_speed[task_lanes[i]] for i in running}
        for stage, capacity in enumerate(stages):
            users = {i: share for i, used, share in uses if used == stage and i in speed}
            level = _level(capacity, [speed[i] * share for i, share in users.items()])
            for i, share in users.items():
                speed[i] = min(speed[i], level / share)
        step = min(left[i] / speed[i] for i in running)
        now += step
        for task in running:
            left[task] -= step * speed[task]
    if any(time is None for time in stop):
        return None
    return [t for t in start if t is not None], [t for t in stop if t is not None]


def _level(capacity: Fraction, wanted: Sequence[Fraction]) -> Fraction:
    """Return the most that each may have so that all together have the capacity, or all want."""
    level = Fraction(0)
    more = sorted(wanted)
    while more:
        step = min(more[0] - level, capacity / len(more))
        level, capacity = level + step, capacity - step * len(more)
        if capacity == 0:
            return level
        more = [w for w in more if w > level]
    return level
