"""The records that a report's content is made of: what the inputs say, ready to be shown."""

from __future__ import annotations

import math

from syncline.model.document import Value
from syncline.model.network import Contention
from syncline.model.profile import Phase
from syncline.model.run import Decision, Event, Rate

__all__ = [
    "Check",
    "FittedPoint",
    "KeyFigure",
    "LargeGradient",
    "LargeOperation",
    "MessageFacts",
    "NetworkFacts",
    "PlannerRow",
    "PlannerTable",
    "ProfileFacts",
    "RunFacts",
    "TimelineFacts",
    "Verdict",
    "number",
]


class TimelineFacts(Value, frozen=True):
    """Totals of one timeline, in seconds."""

    name: str
    source: str
    iteration_s: float
    computation_s: float
    """While at least one operation runs."""
    communication_s: float
    """While at least one message is under way."""
    exposed_s: float
    """While a message is under way and nothing computes."""
    spans: int
    stall_s: float = 0.0
    """While the computation waits for messages, where the timeline records waits."""
    order_stall_s: float = 0.0
    """While nothing is under way, the next message is not ready and a later one is."""
    line_share: float = 0.0
    """Share of the iteration in which at least one message is under way."""


class PlannerRow(Value, frozen=True):
    """One planner of the table, with what follows from its prediction."""

    planner: str
    chosen: bool
    iteration_s: float
    messages: int
    computation_s: float
    communication_s: float
    exposed_s: float
    exposed_fraction: float
    lower_bound_s: float
    distance_to_bound: float


class PlannerTable(Value, frozen=True):
    """The planners, fastest first."""

    model: str
    network: str
    workers: int
    rows: tuple[PlannerRow, ...]
    chosen: str
    reason: str
    suggestion: str = ""
    """What sparse exchange would gain, in a sentence; empty where that was not predicted."""
    sharing: str = ""
    """What jobs that share the links do to the chosen planner's iteration; empty for one job."""


class Check(Value, frozen=True):
    """One quantity that was predicted and measured."""

    what: str
    predicted_s: float
    measured_s: float
    noise_s: float | None
    error: float | None
    """Predicted relative to measured, signed; None where nothing was measured to differ from."""


class FittedPoint(Value, frozen=True):
    """A measured all-reduce beside what the fitted curve says of it."""

    size_bytes: int
    time_s: float
    fitted_s: float
    error: float | None
    """Fitted relative to measured, signed; None for a point of 0 s."""


class NetworkFacts(Value, frozen=True):
    """What the network costs, and how well that is known."""

    name: str
    workers: int
    backend: str
    startup_s: float
    alpha_s: float | None
    beta_s_per_byte: float | None
    gamma_s_per_byte: float | None
    contention: Contention
    fit_error: float | None
    fit_error_max: float | None
    points: tuple[FittedPoint, ...]


class MessageFacts(Value, frozen=True):
    """One message of the plan."""

    number: int
    label: str
    tensors: tuple[str, ...]
    size_bytes: int


class LargeGradient(Value, frozen=True):
    """A gradient with its share of all gradient bytes."""

    name: str
    elements: int
    dtype: str
    size_bytes: int
    share: float


class LargeOperation(Value, frozen=True):
    """An operation with its share of the computing time."""

    name: str
    phase: Phase
    duration_s: float
    share: float


class ProfileFacts(Value, frozen=True):
    """What was profiled, and its totals."""

    model: str
    device: str
    workers: int
    iterations: int
    operations: int
    gradients: int
    gradient_bytes: int
    computation_s: float
    phases_s: dict[str, float]
    largest_gradients: tuple[LargeGradient, ...]
    largest_operations: tuple[LargeOperation, ...]


class RunFacts(Value, frozen=True):
    """What the run was, and what it decided and reached."""

    model: str
    workers: int
    backend: str
    machine: str
    decision: Decision
    reason: str
    planner: str
    messages: int
    deferred: bool
    rates: tuple[Rate, ...]
    results: dict[str, float | None]
    """None where one is not a number."""
    events: tuple[Event, ...]


class Verdict(Value, frozen=True):
    """The outcome: what happened, what was expected, and the reason for the decision."""

    headline: str
    detail: str = ""

    @property
    def sentence(self) -> str:
        """Headline and detail as one sentence."""
        return f"{self.headline}; {self.detail}." if self.detail else f"{self.headline}."


def number(value: float) -> float | None:
    """Return a number as JSON has it, which has no NaN."""
    return None if math.isnan(value) else value


class KeyFigure(Value, frozen=True):
    """One number worth knowing first."""

    name: str
    label: str
    value: float | None
    """None where a training's result is not a number."""
    unit: str
    """``s``, ``fraction``, ``iterations``, ``samples/s``, or empty."""
    noise: float | None = None
    """Standard error, in the unit of the value."""
    note: str = ""
