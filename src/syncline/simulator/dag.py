"""The DAG of synchronous SGD over several iterations and workers (dag-model, section IV).

A worker's operations are laid out once, as slots on lanes; workers and iterations repeat them with
their own durations. Messages join the workers of one iteration, and what a plan lets wait joins one
iteration to the next:

    iteration k:  [slots before the exchange, of every worker] [messages] [slots after it, of every
    worker, each worker's ending with a join of all that it ran]

Every task stands after what it waits for, so that the native engine needs one pass where no lane is
contended.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.simulator.graph import TaskGraph, Times
from syncline.simulator.layout import Layout
from syncline.simulator.messages import MessageTask
from syncline.simulator.workers import WorkerClass

__all__ = ["Dag", "Indices"]

Indices = NDArray[np.int64]


class Dag(NamedTuple):
    """A task graph, and where in it everything is."""

    graph: TaskGraph
    layout: Layout
    messages: tuple[MessageTask, ...]
    classes: tuple[WorkerClass, ...]
    iterations: int

    @property
    def block(self) -> int:
        """Tasks of one iteration."""
        return len(self.classes) * len(self.layout.slots) + len(self.messages)

    def slot_tasks(self, slot: int) -> Indices:
        """Return the tasks of a slot: shape ``(iterations, classes)``."""
        early = self.layout.before_exchange
        late = len(self.layout.slots) - early
        count = len(self.classes)
        first, width = slot, early
        if slot >= early:
            first, width = count * early + len(self.messages) + slot - early, late
        iterations = np.arange(self.iterations, dtype=np.int64)[:, None] * self.block
        return iterations + first + np.arange(count, dtype=np.int64) * width

    def message_tasks(self, task: int) -> Indices:
        """Return the tasks of one of :attr:`messages`: shape ``(iterations, 1)``."""
        first = len(self.classes) * self.layout.before_exchange
        return np.arange(self.iterations, dtype=np.int64)[:, None] * self.block + first + task

    @property
    def joins(self) -> Indices:
        """The tasks that end the workers' iterations: shape ``(iterations, classes)``."""
        return self.slot_tasks(len(self.layout.slots) - 1)

    def ends_ns(self, stop_ns: Times) -> Times:
        """Return when each iteration ends: its last join or, at the end, its last message."""
        return np.asarray(stop_ns[self.joins].max(axis=1))
