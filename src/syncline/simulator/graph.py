"""A task graph with named lanes, and its run by the native engine."""

from __future__ import annotations

from collections.abc import Iterable

from syncline import _native

__all__ = ["TaskGraph"]


class TaskGraph:
    """Tasks on lanes with dependencies, built up task by task.

    The graph of dag-model, section IV: computing and communication tasks, an edge from each task to
    those that may only begin after it.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, tuple[int, bool]] = {}
        self._lane_index: dict[str, int] = {}
        self._contentions: list[tuple[int, int, float]] = []
        self._task_lanes: list[int] = []
        self._durations_ns: list[int] = []
        self._offsets: list[int] = [0]
        self._predecessors: list[int] = []

    def add_lane(self, name: str, *, capacity: int = 1, in_order: bool = True) -> None:
        """Add a resource.

        Args:
            name: the lane's name, new to this graph.
            capacity: how many tasks it runs at once.
            in_order: start tasks strictly in the order in which they were added (a static plan);
                otherwise whichever is ready, the first added first.
        """
        self._lane_index[name] = len(self._lanes)
        self._lanes[name] = (capacity, in_order)

    def add_contention(self, lane_a: str, lane_b: str, slowdown: float) -> None:
        """Make both lanes ``slowdown`` times slower while both are busy."""
        self._contentions.append((self._lane_index[lane_a], self._lane_index[lane_b], slowdown))

    def add_task(self, lane: str, duration_ns: int, after: Iterable[int] = ()) -> int:
        """Add a task to a lane and return its index.

        Args:
            lane: a lane that was added.
            duration_ns: how long it takes alone, in nanoseconds.
            after: indices of the tasks that it waits for.
        """
        self._task_lanes.append(self._lane_index[lane])
        self._durations_ns.append(duration_ns)
        self._predecessors.extend(after)
        self._offsets.append(len(self._predecessors))
        return len(self._durations_ns) - 1

    def run(self) -> tuple[list[int], list[int]]:
        """Return the start and the stop of every task, in nanoseconds from 0."""
        return _native.simulate(
            list(self._lanes.values()),
            self._contentions,
            self._task_lanes,
            self._durations_ns,
            self._offsets,
            self._predecessors,
        )
