"""``Run``: the record of a training run: what was measured, decided and gained."""

from __future__ import annotations

from typing import ClassVar, Literal

from syncline.model.document import Document, Value

__all__ = ["Decision", "Event", "Rate", "Run"]

Decision = Literal["planned", "ddp", "reverted", "undecided"]
"""``planned``: the plan runs; ``ddp``: no plan was predicted to gain; ``reverted``: a plan was
tried, lost and was dropped; ``undecided``: training ended before the measurement did."""


class Event(Value, frozen=True, kw_only=True):
    """Something the run decided, with its iteration."""

    iteration: int
    text: str


class Rate(Value, frozen=True, kw_only=True):
    """Measured iteration time of one way of training."""

    name: str
    iteration_s: float
    """Median seconds an iteration."""
    noise_s: float
    """Standard error of the median, seconds."""
    iterations: int
    samples_per_s: float | None = None


class Run(Document, frozen=True, kw_only=True):
    """The record that a run leaves beside its profile, network, plan and timelines."""

    KIND: ClassVar[str] = "run"
    VERSION: ClassVar[int] = 1

    model: str
    workers: int
    backend: str
    machine: str
    """Processor, cores and versions, in a line."""
    decision: Decision
    reason: str
    planner: str
    """The planner whose messages ran at the end."""
    messages: int
    baseline: Rate | None = None
    planned: Rate | None = None
    predicted_baseline_s: float | None = None
    predicted_planned_s: float | None = None
    overhead_iterations: float | None = None
    """Time spent on measuring and planning, in iterations of stock DDP."""
    events: tuple[Event, ...] = ()
    rates: tuple[Rate, ...] = ()
    """Rates over the whole run, of Syncline and of whatever it was compared with."""
    results: dict[str, float] = {}
    """What the training reached, such as ``{"test accuracy": 0.98}``."""

    @property
    def prediction_error(self) -> float | None:
        """Relative error of the predicted against the measured iteration time, signed."""
        if self.planned is not None and self.predicted_planned_s is not None:
            return self.predicted_planned_s / self.planned.iteration_s - 1
        if self.baseline is not None and self.predicted_baseline_s is not None:
            return self.predicted_baseline_s / self.baseline.iteration_s - 1
        return None
