"""Waiting in a simulated run: lanes for messages, and messages to be sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from syncline.model.plan import Plan
from syncline.simulator.dag import Dag
from syncline.simulator.steady import Steady

__all__ = ["LaneWait", "ready_ns", "waits"]

Before = dict[int, list[int]]
"""Task -> those that it waits for."""


class LaneWait(NamedTuple):
    """A lane was idle before a slot because messages had not arrived."""

    slot: int
    worker_class: int
    start_ns: int
    stop_ns: int


def waits(steady: Steady, classes: Sequence[int], iterations: Sequence[int]) -> Iterator[LaneWait]:
    """Yield the times in which a lane that runs its slots in order waited only for messages.

    Such a wait begins when the slot before it on the lane is done, and all else that it needs.

    Args:
        steady: the run.
        classes: indices of the workers to look at.
        iterations: those to look at, one after the other.
    """
    dag = steady.dag
    slots = dag.layout.slots
    # With the one before, for what it left on the lanes.
    rows = range(max(iterations[0] - 1, 0), iterations[-1] + 1)
    tasks = np.stack([dag.slot_tasks(slot)[rows][:, classes] for slot in range(len(slots))])
    before = _before(dag, tasks[:, rows.index(iterations[0]) :].ravel())
    for column, number in enumerate(classes):
        free_ns: dict[str, int] = {}
        for row in range(len(rows)):
            for slot, shape in enumerate(slots):
                task = int(tasks[slot, row, column])
                # Without an update, the next iteration's first operation waits.
                lane = "device" if shape.operation is None else shape.lane
                arrived_ns, other_ns = 0, free_ns.get(lane, 0)
                for earlier in before.get(task, ()):
                    stop_ns = int(steady.stop_ns[earlier])
                    if _message_of(dag, earlier) is None:
                        other_ns = max(other_ns, stop_ns)
                    else:
                        arrived_ns = max(arrived_ns, stop_ns)
                if arrived_ns > other_ns:
                    yield LaneWait(slot, number, other_ns, arrived_ns)
                free_ns[lane] = max(free_ns.get(lane, 0), int(steady.stop_ns[task]))


def ready_ns(steady: Steady, plan: Plan, iterations: Sequence[int]) -> dict[int, int]:
    """Return, by task, when messages could have been sent: of each, for the task that begins it.

    A sum that is handed round is ready when it has been made. A message that is held back for a
    while was ready before.

    Args:
        steady: the run.
        plan: what was sent in it.
        iterations: those to look at.
    """
    dag = steady.dag
    tasks = np.stack([dag.message_tasks(i)[iterations, 0] for i in range(len(dag.messages))])
    before = _before(dag, tasks.ravel())
    found: dict[int, int] = {}
    for index, shape in enumerate(dag.messages):
        own = plan.messages[shape.message]
        for task in tasks[index].tolist():
            causes = before.get(task, [])
            while delays := [c for c in causes if _lane(dag, c) == "delay"]:
                causes = [c for c in causes if c not in delays]
                causes += [c for delay in delays for c in before.get(delay, [])]
            if shape.lane == "delay" or any(_lane(dag, c) == "startup" for c in causes):
                continue  # it has not begun yet, or has begun already
            ready = 0
            for cause in causes:
                sent = _message_of(dag, cause)
                if sent is not None:
                    other = plan.messages[dag.messages[sent].message]
                    if other.start >= own.stop or own.start >= other.stop:
                        continue  # that one only made room
                ready = max(ready, int(steady.stop_ns[cause]))
            found[task] = ready
    return found


def _before(dag: Dag, tasks: Iterable[int]) -> Before:
    before, after = dag.graph.edges()
    chosen = np.isin(after, np.fromiter(tasks, dtype=np.int64))
    found: Before = {}
    for earlier, task in zip(before[chosen].tolist(), after[chosen].tolist(), strict=True):
        found.setdefault(task, []).append(earlier)
    return found


def _message_of(dag: Dag, task: int) -> int | None:
    """Return which of ``dag.messages`` a task is, or None if it is a worker's."""
    index = task % dag.block - len(dag.classes) * dag.layout.before_exchange
    return index if 0 <= index < len(dag.messages) else None


def _lane(dag: Dag, task: int) -> str:
    """Return the lane of a message's task, and "" of any other."""
    index = _message_of(dag, task)
    return "" if index is None else dag.messages[index].lane
