"""What the user asked of the wrapper, and the stages of training in which it measures."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.measure.observer import Iteration
from syncline.measure.segments import Trace
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.model.recipe import Compression
from syncline.parallel.recording import Recorded
from syncline.planners.ddp import Ddp

__all__ = ["Settings", "Stage", "StageResult"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for."""

    planner: str
    plan: Plan | None
    profile: Profile | None
    network: Network | None
    check: bool
    compression: Compression | None = None
    ddp: Ddp
    """DDP's own buckets under the user's arguments."""
