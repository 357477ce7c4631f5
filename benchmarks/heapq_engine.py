"""The peer of the native engine: a discrete-event simulator in plain Python, on ``heapq``."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence


def simulate(
    lanes: int, task_lanes: Sequence[int], durations_ns: Sequence[int], before: Sequence[list[int]]
) -> list[int]:
    """Return when each task stops, on lanes that run one task at a time in the listed order."""
    count = len(task_lanes)
    waiting = [len(b) for b in before]
    after: list[list[int]] = [[] for _ in range(count)]
    queues: list[deque[int]] = [deque() for _ in range(lanes)]
    for task in range(count):
        queues[task_lanes[task]].append(task)
        for earlier in before[task]:
            after[earlier].append(task)
    busy = [False] * lanes
    stop = [0] * count
    events: list[tuple[int, int]] = []

    def start(lane: int, now: int) -> None:
        queue = queues[lane]
        if not busy[lane] and queue and waiting[queue[0]] == 0:
            task = queue.popleft()
            busy[lane] = True
            heapq.heappush(events, (now + durations_ns[task], task))

    for lane in range(lanes):
        start(lane, 0)
    while events:
        now, task = heapq.heappop(events)
        stop[task] = now
        lane = task_lanes[task]
        busy[lane] = False
        for later in after[task]:
            waiting[later] -= 1
            if waiting[later] == 0:
                start(task_lanes[later], now)
        start(lane, now)
    return stop
