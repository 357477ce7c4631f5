"""Analysis of a simulated run: its critical path, and what waited for what.

The critical path is walked back from the end of an iteration: before each task comes one whose end
let it begin, on the same lane if possible. Its parts add up to the time that it spans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.errors import InternalError
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.quantities import NS_PER_S
from syncline.plan.simulator.dag import Dag
from syncline.plan.simulator.graph import TaskGraph, Times
from syncline.plan.simulator.steady import Steady
from syncline.plan.whatif import PathPart

NONE = -1


class PathStep(NamedTuple):
    """A task on the critical path of an iteration."""

    start_ns: int
    """From the beginning of the iteration; a task that began earlier is counted from there."""
    stop_ns: int
    kind: str
    """A phase of the profile, ``message``, ``delay``, or ``join`` at the end of an iteration."""
    label: str
    rank: int | None = None
    """First rank of the workers that ran it; None for a message, or where all are alike."""
    message: int | None = None  # index of the message in the plan

    @property
    def duration_ns(self) -> int:
        """Time of the step on the path."""
        return self.stop_ns - self.start_ns


def critical_tasks(graph: TaskGraph, start_ns: Times, stop_ns: Times, last: int) -> list[int]:
    """Return the tasks of the path that ends with ``last``, the earliest first."""
    cause, begun_with = _causes(graph, start_ns, stop_ns)
    path = [last]
    task = last
    while start_ns[task] > 0:
        if cause[task] != NONE:
            task = int(cause[task])
            path.append(task)
        elif begun_with[task] != NONE:  # the same task let both begin
            task = int(begun_with[task])
        else:
            raise InternalError(
                f"task {task} begins at {start_ns[task]} ns, but nothing that it waits for ends "
                "then; please report this with the profile and the plan"
            )
    path.reverse()
    return path


def _causes(
    graph: TaskGraph, start_ns: Times, stop_ns: Times
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each task, a task whose end let it begin, and one whose start did; or -1.

    Walking back terminates: of tasks that start together, only one without duration can be the
    cause, and that comes first on its lane or in the list.
    """
    cause = np.full(len(graph), NONE, dtype=np.int64)
    begun_with = np.full(len(graph), NONE, dtype=np.int64)
    before, after = graph.edges()
    binding = stop_ns[before] == start_ns[after]
    cause[after[binding]] = before[binding]

    lanes = graph.lanes
    single = np.array([lane.capacity == 1 for lane in lanes], dtype=bool)
    in_order = np.array([lane.in_order for lane in lanes], dtype=bool)
    tasks, lane_of = graph.lane_members()
    # In the order in which they run. On a lane without order, of tasks that start together, first
    # those without duration.
    shorter = np.where(in_order[lane_of], 0, stop_ns[tasks])
    order = np.lexsort((tasks, shorter, start_ns[tasks], lane_of))
    tasks, lane_of = tasks[order], lane_of[order]
    one, next_one = tasks[:-1], tasks[1:]
    neighbours = lane_of[:-1] == lane_of[1:]

    binding = neighbours & single[lane_of[1:]] & (stop_ns[one] == start_ns[next_one])
    cause[next_one[binding]] = one[binding]
    binding = neighbours & in_order[lane_of[1:]] & (start_ns[one] == start_ns[next_one])
    begun_with[next_one[binding]] = one[binding]
    edges = np.searchsorted(lane_of, np.arange(len(lanes) + 1))
    for index, lane in enumerate(lanes):
        if lane.capacity > 1:
            own = tasks[edges[index] : edges[index + 1]]
            _freed(cause, own, start_ns, stop_ns)
    return cause, begun_with


def _freed(
    cause: NDArray[np.int64], own: NDArray[np.int32], start_ns: Times, stop_ns: Times
) -> None:
    """Set the cause of tasks on a lane with several places to a task whose end freed a place."""
    by_stop = own[np.lexsort((start_ns[own], stop_ns[own]))]
    place = np.searchsorted(stop_ns[by_stop], start_ns[own])
    found = by_stop[np.minimum(place, len(by_stop) - 1)]
    binding = (stop_ns[found] == start_ns[own]) & (start_ns[found] < start_ns[own])
    cause[own[binding]] = found[binding]


def critical_path(profile: Profile, plan: Plan, steady: Steady) -> list[PathStep]:
    """Return the critical path of one iteration in the steady state, in the order of time."""
    dag, begin_ns = steady.dag, steady.begin_ns
    if dag.iterations == 1:
        last = int(np.argmax(steady.stop_ns))
    else:
        joins = dag.joins[steady.window]
        last = int(joins[np.argmax(steady.stop_ns[joins])])
    tensors = plan.message_tensors()
    steps = []
    for task in critical_tasks(dag.graph, steady.start_ns, steady.stop_ns, last):
        start_ns, stop_ns = max(int(steady.start_ns[task]), begin_ns), int(steady.stop_ns[task])
        if start_ns < stop_ns:
            about = _about(profile, plan, tensors, dag, task)
            steps.append(PathStep(start_ns - begin_ns, stop_ns - begin_ns, *about))
    return steps


def _about(
    profile: Profile, plan: Plan, tensors: Sequence[range], dag: Dag, task: int
) -> tuple[str, str, int | None, int | None]:
    """Return the kind, label, rank and message of a task, as in :class:`PathStep`."""
    part = dag.message_of(task)
    if part is not None:
        label = "norms" if part.norms else plan.label(tensors[part.message])
        return "delay" if part.lane == "delay" else "message", label, None, part.message
    number, index = dag.slot_of(task)
    slot = dag.layout.slots[index]
    rank = dag.classes[number].first if len(dag.classes) > 1 else None
    if slot.operation is None:
        return "join", "", rank, None
    operation = profile.operations[slot.operation]
    if slot.deferred_update:
        return "update", f"update before {operation.name}", rank, None
    return operation.phase, operation.name, rank, None


def path_parts(steps: Sequence[PathStep]) -> tuple[PathPart, ...]:
    """Return the path with neighbouring steps of one kind and worker joined, except messages."""
    parts = []
    for (kind, rank, message), group in itertools.groupby(
        steps, key=lambda step: (step.kind, step.rank, step.message)
    ):
        members = list(group)
        first, last = members[0].label, members[-1].label
        label = first if message is not None or len(members) == 1 else f"{first} .. {last}"
        time_s = sum(step.duration_ns for step in members) / NS_PER_S
        parts.append(PathPart(kind=kind, label=label, time_s=time_s, rank=rank))
    return tuple(parts)


def waits(
    steady: Steady, classes: Sequence[int], iterations: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (slot, class, start_ns, stop_ns) where a lane waited only for messages."""
    dag = steady.dag
    slots = dag.layout.slots
    # Including the previous iteration, for what it left on the lanes.
    rows = range(max(iterations[0] - 1, 0), iterations[-1] + 1)
    tasks = np.stack([dag.slot_tasks(slot)[rows][:, classes] for slot in range(len(slots))])
    before = _before(dag, tasks[:, rows.index(iterations[0]) :])
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
                    if dag.message_of(earlier) is None:
                        other_ns = max(other_ns, stop_ns)
                    else:
                        arrived_ns = max(arrived_ns, stop_ns)
                if arrived_ns > other_ns:
                    yield slot, number, other_ns, arrived_ns
                free_ns[lane] = max(free_ns.get(lane, 0), int(steady.stop_ns[task]))


def ready_ns(steady: Steady, plan: Plan, iterations: Sequence[int]) -> dict[int, int]:
    """Return when each message could have been sent without its delay, by its first task."""
    dag = steady.dag
    tasks = dag.message_tasks()[iterations]
    before = _before(dag, tasks)

    def on(lane: str, causes: list[int]) -> list[int]:
        """Return the tasks among ``causes`` that are a message's on a lane."""
        return [c for c in causes if (sent := dag.message_of(c)) and sent.lane == lane]

    found: dict[int, int] = {}
    for index, shape in enumerate(dag.messages):
        own = plan.messages[shape.message]
        for task in tasks[:, index].tolist():
            causes = before.get(task, [])
            while delays := on("delay", causes):
                causes = [c for c in causes if c not in delays]
                causes += [c for delay in delays for c in before.get(delay, [])]
            if shape.lane == "delay" or on("latency", causes):
                continue  # the delay before a message, or its transmission after the latency
            ready = 0
            for cause in causes:
                sent = dag.message_of(cause)
                if sent is not None:
                    other = plan.messages[sent.message]
                    apart = other.start >= own.stop or own.start >= other.stop
                    if apart and not shape.norms:
                        continue  # the other message only made room for this one
                ready = max(ready, int(steady.stop_ns[cause]))
            found[task] = ready
    return found


def _before(dag: Dag, tasks: NDArray[np.int64]) -> dict[int, list[int]]:
    """Return, for each of some tasks, the tasks that it waits for."""
    before, after = dag.graph.edges()
    chosen = np.isin(after, tasks)
    found: dict[int, list[int]] = {}
    for earlier, task in zip(before[chosen].tolist(), after[chosen].tolist(), strict=True):
        found.setdefault(task, []).append(earlier)
    return found
