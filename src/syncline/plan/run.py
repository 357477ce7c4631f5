"""``Run``: the record of a training run."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import msgspec

from syncline.errors import UserError, quoted
from syncline.plan.document import NOT_JSON, Document, Value
from syncline.plan.prediction import Suggestion
from syncline.plan.quantities import require_finite
from syncline.plan.recipe import Compression

Decision = Literal["planned", "ddp", "reverted", "undecided"]
"""``planned``: the plan runs; ``ddp``: no plan was predicted to gain; ``reverted``: a plan was
tried, lost and was dropped; ``undecided``: training ended before the measurement did."""


class Event(Value, frozen=True, kw_only=True):
    """A decision of the run."""

    iteration: int
    text: str


class PhaseSpan(Value, frozen=True, kw_only=True):
    """Successive iterations in one phase of training."""

    name: str
    start: int  # iterations of training before it
    iterations: int
    seconds: float
    """Of the iterations and the work between them, such as probing and planning. Unusually slow
    iterations count as a few usual ones at most."""

    def __post_init__(self) -> None:
        where = f"phase {quoted(self.name)}"
        if min(self.start, self.iterations) < 0:
            raise UserError(f"{where}: start and iterations must be at least 0, found {self}")
        require_finite(f"{where}: seconds", self.seconds)


class Rate(Value, frozen=True, kw_only=True):
    """Measured iteration time of one way of training."""

    name: str
    iteration_s: float  # median
    noise_s: float  # standard error of the median
    iterations: int
    samples_per_s: float | None = None

    def __post_init__(self) -> None:
        where = f"rate {quoted(self.name)}"
        require_finite(f"{where}: iteration_s", self.iteration_s, above_0=True)
        require_finite(f"{where}: noise_s", self.noise_s)

    def over(self, other: Rate) -> tuple[float, float]:
        """Return the ratio of the two iteration times, and its standard error."""
        ratio = self.iteration_s / other.iteration_s
        relative = (self.noise_s / self.iteration_s, other.noise_s / other.iteration_s)
        return ratio, ratio * math.hypot(*relative)


class Sent(Value, frozen=True, kw_only=True):
    """What the first rank of a compressed training has sent since it was started or resumed."""

    steps: int  # steps whose gradients were compressed
    sent_bytes: int  # in all of these steps
    gradient_bytes: int  # of one step, uncompressed

    def __post_init__(self) -> None:
        if min(self.steps, self.sent_bytes, self.gradient_bytes) < 0:
            raise UserError(f"run: what was sent cannot be negative: {self}")


class RankMemory(Value, frozen=True, kw_only=True):
    """Memory that training keeps on one rank, and the peak of its process."""

    parameters_bytes: int
    gradients_bytes: int
    state_bytes: int  # of the optimizer, at the end
    predicted_state_bytes: int
    peak_bytes: int  # resident memory of the process, including everything that is not a tensor


class Run(Document, frozen=True, kw_only=True):
    """What a training run measured, decided, did and reached."""

    KIND: ClassVar[str] = "run"
    VERSION: ClassVar[int] = 1

    model: str
    workers: int
    backend: str
    machine: str  # processor, cores and versions in one line
    decision: Decision
    reason: str
    planner: str  # the planner whose messages ran at the end
    messages: int
    deferred: bool = False
    """Whether messages overlapped the next forward pass, which applied the updates."""
    baseline: Rate | None = None  # the DDP baseline in the first iterations
    planned: Rate | None = None  # the best plan that was tried, in the iterations right after
    steady: Rate | None = None  # the plan or DDP that ran in the end, over its last iterations
    predicted_baseline_s: float | None = None
    predicted_planned_s: float | None = None
    overhead_iterations: float | None = None
    """Time spent on measuring and planning, in iterations of the DDP baseline."""
    compression: Compression | None = None  # how gradients were compressed, if at all
    sent: Sent | None = None
    suggestion: Suggestion | None = None
    """The prediction for sparse exchange, which is never switched on by itself."""
    phases: tuple[PhaseSpan, ...] = ()
    """In the order in which they came; empty in files of earlier releases."""
    memory: tuple[RankMemory, ...] = ()  # by rank, where it was asked for
    events: tuple[Event, ...] = ()
    rates: tuple[Rate, ...] = ()  # rates over the whole run, of Syncline and of the baselines
    results: dict[str, float] = msgspec.field(default_factory=dict)
    """What the training reached, such as ``{"test accuracy": 0.98}``; NaN where it diverged."""

    @classmethod
    def _from_fields(cls, fields: dict[str, msgspec.Raw], source: str) -> Self:
        # JSON has no NaN: the loss of a run that diverged is written as null.
        try:
            results = msgspec.json.decode(fields["results"], type=dict[str, float | None])
        except (KeyError, *NOT_JSON):  # the next line reports what is missing or wrong
            return super()._from_fields(fields, source)
        if None not in results.values():
            return super()._from_fields(fields, source)
        numbers = {name: value for name, value in results.items() if value is not None}
        text = msgspec.Raw(msgspec.json.encode(numbers))
        run = super()._from_fields({**fields, "results": text}, source)
        read = {name: math.nan if value is None else value for name, value in results.items()}
        return msgspec.structs.replace(run, results=read)

    def phase_text(self, phase: str) -> str:
        """Return a phase of the training in words, with the gain once the final plan runs."""
        if phase not in ("recording", "steady"):
            return phase
        if self.decision != "planned":
            return "running DDP"
        gain = ""
        if self.baseline is not None and self.planned is not None:
            gain = f", {self.baseline.iteration_s / self.planned.iteration_s:.2f}x DDP"
        return f"running {self.planner}{gain}"

    @property
    def predicted_s(self) -> float | None:
        """Predicted iteration time of the plan, or of DDP, that ran in the end."""
        planned = self.decision == "planned"
        return self.predicted_planned_s if planned else self.predicted_baseline_s

    @property
    def measured(self) -> Rate | None:
        """Measured rate of what ran in the end: over its last iterations if there were enough."""
        return self.steady or (self.planned if self.decision == "planned" else self.baseline)

    @property
    def prediction_error(self) -> float | None:
        """Signed error of the predicted iteration time, relative to the measured one."""
        measured, predicted_s = self.measured, self.predicted_s
        if measured is None or predicted_s is None or measured.iteration_s <= 0:
            return None
        return predicted_s / measured.iteration_s - 1
