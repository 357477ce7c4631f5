"""The tasks that a step of a profiler trace consists of."""

from __future__ import annotations

from typing import NamedTuple

from syncline.model.profile import Phase, Resource
from syncline.traces.kineto_collectives import Collective

__all__ = ["ReadyPoint", "StepTasks", "Task"]


class Task(NamedTuple):
    """A piece of work; the fields are those of an operation, beside when it was measured."""

    name: str
    phase: Phase
    resource: Resource
    duration_ns: int
    after: tuple[int, ...]
    start_ns: int
    stop_ns: int
    joint: bool = False
    """It waits for the device, or something waits for just this task: never merged with others."""


class ReadyPoint(NamedTuple):
    """A gradient, or the gradients of a bucket, becoming final."""

    elements: int | None
    dtype: str | None
    ready_after: int
    needed_by: int | None
    record_id: int | None
    """Record function id of the operator that made it final."""
    message: int | None = None
    """Index of the message that it is part of."""


class StepTasks(NamedTuple):
    """A step as tasks."""

    number: int
    duration_ns: int
    start_ns: int
    tasks: list[Task]
    parameters: list[ReadyPoint]
    """One for each gradient tensor, in the order in which they became final."""
    messages: list[ReadyPoint]
    """One for each exchanged bucket, in the order in which they were launched."""
    collectives: list[Collective]
    """When each message was under way."""
    notes: list[str]
