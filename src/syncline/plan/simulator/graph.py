"""A task graph, and its run by the native engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from syncline import _native

Times = NDArray[np.int64]  # nanoseconds from 0, one a task; shape ``(tasks,)``


class Lane(NamedTuple):
    """A resource that runs tasks."""

    capacity: int  # tasks that it runs at once; 0 for any number
    in_order: bool  # whether it starts tasks in the order in which they were added


class TaskGraph:
    """Tasks on lanes with dependencies, built up in arrays (dag-model, section IV)."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []  # the resources, by index
        self._contentions: list[tuple[int, int, float, float]] = []
        self._count = 0
        self._tasks = _Columns(np.int32, np.int64)  # lane, nanoseconds
        self._edges = _Columns(np.int32, np.int32)  # task, task that it waits for
        self._holds = _Columns(np.int32, np.int32)  # task, lane
        self._stages: list[float] = []
        self._uses = _Columns(np.int32, np.int32, np.float64)  # task, stage, share

    def __len__(self) -> int:
        return self._count

    def add_lane(self, *, capacity: int | None = 1, in_order: bool = True) -> int:
        """Add a resource that runs ``capacity`` tasks at once, or any number; return its index.

        Tasks start in the order in which they were added or, unless ``in_order``, once ready.
        """
        self.lanes.append(Lane(capacity or 0, in_order))
        return len(self.lanes) - 1

    def add_contention(
        self, lane_a: int, lane_b: int, slowdown_a: float, slowdown_b: float
    ) -> None:
        """Make each lane slower by its factor while both are busy."""
        self._contentions.append((lane_a, lane_b, slowdown_a, slowdown_b))

    def add_tasks(self, lanes: ArrayLike, durations_ns: ArrayLike) -> int:
        """Add tasks, given their lanes and how long each takes alone; return the first one's index.

        Here and below, arrays of tasks, lanes and times are of shapes that broadcast together.
        """
        first = self._count
        self._count += self._tasks.extend(lanes, durations_ns)
        return first

    def add_edges(self, before: ArrayLike, after: ArrayLike) -> None:
        """Make each task of ``after`` wait for the corresponding one of ``before``."""
        self._edges.extend(after, before)

    def hold(self, tasks: ArrayLike, lanes: ArrayLike) -> None:
        """Make each task hold one more lane beside its own, both limited and not in order."""
        self._holds.extend(tasks, lanes)

    def add_stage(self) -> int:
        """Add a resource of capacity 1 that running tasks share (:meth:`use`); return its index."""
        self._stages.append(1.0)
        return len(self._stages) - 1

    def use(self, tasks: ArrayLike, stage: int, share: float) -> None:
        """Make each task need a share of a stage, whose capacity is shared max-min fairly."""
        self._uses.extend(tasks, stage, share)

    def extend(self, other: TaskGraph) -> int:
        """Add another graph, whose stages keep their index; return the index of its first task."""
        self._stages = self._stages or list(other._stages)
        first, lanes = self._count, len(self.lanes)
        self.lanes += other.lanes
        self._contentions += [
            (a + lanes, b + lanes, of_a, of_b) for a, b, of_a, of_b in other._contentions
        ]
        task_lanes, durations_ns = other._tasks.arrays()
        self.add_tasks(task_lanes + lanes, durations_ns)
        self._edges.extend(*(tasks + first for tasks in other._edges.arrays()))
        holders, held = other._holds.arrays()
        self.hold(holders + first, held + lanes)
        users, used, shares = other._uses.arrays()
        self._uses.extend(users + first, used, shares)
        return first

    def lane_members(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return (task, lane) of every task's own lane and of those that it holds beside it."""
        own = np.arange(self._count, dtype=np.int32)
        holders, held = self._holds.arrays()
        lanes, _ = self._tasks.arrays()
        return np.concatenate([own, holders]), np.concatenate([lanes, held])

    def edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return (before, after): each task of ``after`` waits for the one of ``before``."""
        after, before = self._edges.arrays()
        return before, after

    def run(self) -> tuple[Times, Times]:
        """Return the start and the stop of every task."""
        lanes, durations_ns = self._tasks.arrays()
        after, before = self._edges.arrays()
        holders, held = self._holds.arrays()
        users, used, shares = self._uses.arrays()
        tasks = lanes, durations_ns, after, before, holders, held
        return _native.simulate(
            self.lanes, self._contentions, *tasks, self._stages, users, used, shares
        )


class _Columns:
    """Arrays of numbers that grow together."""

    def __init__(self, *dtypes: type[np.number[Any]]) -> None:
        self._parts: list[list[NDArray[Any]]] = [[np.empty(0, dtype)] for dtype in dtypes]

    def extend(self, *columns: ArrayLike) -> int:
        """Append one array to each, of shapes that broadcast together, and return their length."""
        for parts, column in zip(self._parts, np.broadcast_arrays(*columns), strict=True):
            parts.append(np.asarray(column, dtype=parts[0].dtype).ravel())
        return len(self._parts[0][-1])

    def arrays(self) -> list[NDArray[Any]]:
        """Return all columns, each in one array."""
        self._parts = [[np.concatenate(parts)] for parts in self._parts]
        return [parts[0] for parts in self._parts]
