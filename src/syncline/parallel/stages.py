"""What the wrapper runs an iteration under while it measures, and what it learns from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.measure.observer import Iteration
from syncline.measure.segments import Trace
from syncline.model.plan import Plan
from syncline.parallel.recording import Recorded

__all__ = ["Stage", "StageResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A number of training iterations under one set of buckets."""

    name: str
    plan: Plan | None
    """The messages; None for DDP's own buckets."""
    warmup: int
    """Iterations not measured: DDP rebuilds its buckets after the first."""
    iterations: int
    observe: bool = False
    """Note nothing, gradients and modules, or every operation, in turns."""
    record: bool = False
    """Note when each bucket is sent and done, through a communication hook."""


@dataclass(slots=True, kw_only=True)
class StageResult:
    """What this rank measured in a stage."""

    iteration_s: list[float] = field(default_factory=list)
    lean: list[Trace] = field(default_factory=list)
    detailed: list[Trace] = field(default_factory=list)
    quiet_ns: list[int] = field(default_factory=list)
    """Durations of iterations in which nothing was noted."""
    recorded: list[tuple[Iteration, Recorded]] = field(default_factory=list)
    mismatch: str | None = None
    """How the reducer's buckets differed from the plan, if they did."""
    flushed: str | None = None
    """Why hardly anything was left to run under the forward pass, if so."""
    drifted: bool = False
    """Whether the ranks agree that computation or communication has changed for good."""
    slower: bool = False
    """Whether they agree that iterations take longer than those of stock DDP did."""
