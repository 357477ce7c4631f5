"""A task graph with named lanes, and its run by the native engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from syncline import _native

Times = NDArray[np.int64]
"""Nanoseconds from 0, one a task; shape ``(tasks,)``."""


class Lane(NamedTuple):
    """A resource that runs tasks."""

    capacity: int
    """Tasks that it runs at once; 0 for any number."""
    in_order: bool
    """It starts tasks in the order in which they were added."""


class TaskGraph:
    """Tasks on lanes with dependencies, built up task by task or in whole arrays.

    The graph of dag-model, section IV: computing and communication tasks, an edge from each task to
    those that may only begin after it.
    """

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        """The resources, by index."""
        self._lane_index: dict[str, int] = {}
        self._contentions: list[tuple[int, int, float, float]] = []
        self._count = 0
        self._task_lanes = _Column(np.int32)
        self._durations_ns = _Column(np.int64)
        self._tasks, self._before = _Column(np.int32), _Column(np.int32)
        self._holders, self._held = _Column(np.int32), _Column(np.int32)
        self._stages: list[float] = []
        self._users, self._used = _Column(np.int32), _Column(np.int32)
        self._shares = _Column(np.float64)

    def __len__(self) -> int:
        return self._count

    def add_lane(self, name: str, *, capacity: int | None = 1, in_order: bool = True) -> int:
        """Add a resource and return its index.

        Args:
            name: the lane's name, new to this graph.
            capacity: how many tasks it runs at once; None for any number.
            in_order: start tasks strictly in the order in which they were added (a static plan);
                otherwise whichever is ready, the first added first.
        """
        self._lane_index[name] = len(self.lanes)
        self.lanes.append(Lane(capacity or 0, in_order))
        return self._lane_index[name]

    def add_contention(
        self, lane_a: str, lane_b: str, slowdown_a: float, slowdown_b: float
    ) -> None:
        """Make each lane slower by its factor while both are busy."""
        lanes = self._lane_index[lane_a], self._lane_index[lane_b]
        self._contentions.append((*lanes, slowdown_a, slowdown_b))

    def add_task(self, lane: str, duration_ns: int, after: Iterable[int] = ()) -> int:
        """Add a task that waits for others to a lane, and return its index."""
        task = self.add_tasks([self._lane_index[lane]], [duration_ns])
        waits_for = list(after)
        self.add_edges(waits_for, [task] * len(waits_for))
        return task

    def add_tasks(self, lanes: ArrayLike, durations_ns: ArrayLike) -> int:
        """Add tasks and return the index of the first.

        Their lanes (:meth:`add_lane`) and how long they take alone are of shape ``(n,)``.
        """
        first = self._count
        self._count += self._task_lanes.extend(lanes)
        self._durations_ns.extend(durations_ns)
        return first

    def add_edges(self, before: ArrayLike, after: ArrayLike) -> None:
        """Make each task of ``after`` wait for that of ``before``; both of shape ``(n,)``."""
        self._before.extend(before)
        self._tasks.extend(after)

    def hold(self, tasks: ArrayLike, lanes: ArrayLike) -> None:
        """Make each task hold one more lane beside its own, both at once; shapes ``(n,)``.

        The lanes that such tasks run on are limited and not in order.
        """
        self._holders.extend(tasks)
        self._held.extend(lanes)

    def add_stage(self, capacity: float) -> int:
        """Add a capacity that running tasks share (:meth:`use`), and return its index."""
        self._stages.append(capacity)
        return len(self._stages) - 1

    def use(self, tasks: ArrayLike, stage: int, shares: ArrayLike) -> None:
        """Make each task take a share of a stage's capacity while it runs at full speed.

        Tasks that want more than the capacity together share it max-min fairly, and run slower by
        that. Both of shape ``(n,)``; a task uses one stage at most.
        """
        self._shares.extend(shares)
        self._used.extend(np.full(self._users.extend(tasks), stage))

    def extend(self, other: TaskGraph) -> int:
        """Add the lanes and tasks of another graph, and return the index of its first task.

        Its lanes have no names here. Its stages are this graph's of the same index, or are added
        if there are none.
        """
        self._stages = self._stages or list(other._stages)
        first, lanes = self._count, len(self.lanes)
        self.lanes += other.lanes
        self._contentions += [
            (a + lanes, b + lanes, of_a, of_b) for a, b, of_a, of_b in other._contentions
        ]
        self.add_tasks(other._task_lanes.array() + lanes, other._durations_ns.array())
        self.add_edges(other._before.array() + first, other._tasks.array() + first)
        self.hold(other._holders.array() + first, other._held.array() + lanes)
        self._users.extend(other._users.array() + first)
        self._used.extend(other._used.array())
        self._shares.extend(other._shares.array())
        return first

    def lane_members(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return (task, lane) of every task's own lane and of those that it holds beside it."""
        own = np.arange(self._count, dtype=np.int32)
        return (
            np.concatenate([own, self._holders.array()]),
            np.concatenate([self._task_lanes.array(), self._held.array()]),
        )

    def edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return (before, after): each task of ``after`` waits for that of ``before``."""
        return self._before.array(), self._tasks.array()

    def run(self) -> tuple[Times, Times]:
        """Return the start and the stop of every task."""
        return _native.simulate(
            self.lanes,
            self._contentions,
            self._task_lanes.array(),
            self._durations_ns.array(),
            self._tasks.array(),
            self._before.array(),
            self._holders.array(),
            self._held.array(),
            self._stages,
            self._users.array(),
            self._used.array(),
            self._shares.array(),
        )


_Number = TypeVar("_Number", bound=np.number[Any])


class _Column(Generic[_Number]):
    """A growing array of numbers."""

    def __init__(self, dtype: type[_Number]) -> None:
        self._dtype = dtype
        self._parts: list[NDArray[_Number]] = [np.empty(0, dtype)]

    def extend(self, values: ArrayLike) -> int:
        """Append values and return how many there were."""
        part = np.asarray(values, dtype=self._dtype).ravel()
        self._parts.append(part)
        return len(part)

    def array(self) -> NDArray[_Number]:
        """Return all values in one array."""
        self._parts = [np.concatenate(self._parts)]
        return self._parts[0]
