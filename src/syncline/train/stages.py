"""Stages of training, the measurements of all ranks in one, and the findings so far.

Frozen values without torch: rank 0 sends them to the others as JSON. Only the notebook of the
findings changes, on rank 0.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from syncline.plan.document import Value
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.auto import CONFIDENCE, Auto
from syncline.plan.planners.compressed import compressed
from syncline.plan.planners.ddp import Ddp
from syncline.plan.prediction import Comparison
from syncline.plan.profile import ACCUMULATING, COMPUTING, WAIT, Norm, Profile
from syncline.plan.recipe import Compression, Recipe, Rounded
from syncline.plan.run import Decision, Rate
from syncline.plan.simulator.predict import predict
from syncline.plan.timeline import Timeline
from syncline.train.measure.statistics import typical


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for."""

    planner: str = Auto.NAME
    plan: Plan | None = None
    profile: Profile | None = None
    network: Network | None = None
    check: bool = True
    compression: Compression | None = None
    overlap_optimizers: bool = False
    ddp: Ddp = field(default_factory=Ddp)  # DDP's buckets under the user's arguments

    @property
    def wire(self) -> Rounded | None:
        """The type in which all gradients are to travel, if the user has asked for one."""
        return None if isinstance(self.compression, Recipe) else self.compression


MOST_NOISE = 0.005
"""Upper limit of the passes' error, as a share of their time. From two timings that differ by 2 %,
Student's t gives 6 %. That would hide a slowdown of computing, and make messages seem slow."""

Turn = Literal["quiet", "lean", "detailed"]
"""How closely an iteration is observed: as a whole, by gradients and modules, by operations."""


class Stage(Value, frozen=True, kw_only=True, tag=True):
    """A number of training iterations under one set of messages."""

    name: str
    plan: Plan | None = None  # the messages; None for DDP's buckets
    hook: Rounded | None = None
    """Without a plan: the type of torch's hook for DDP's buckets; None: no hook."""
    warmup: int = 0  # iterations that are not measured
    iterations: int = 0
    """Iterations that are measured; 0: the steady state, until something changes."""
    turns: tuple[Turn, ...] = ()
    """How closely the measured iterations are observed, in turns; not at all if empty."""
    record: bool = False  # record when each message is issued and complete
    goes_on: bool = False
    """Continue the measurement of the previous stage: its iterations count, too."""
    baseline: Rate | None = None
    """In the steady state: the DDP baseline, if a plan slower than it is to be reported."""
    watches_reads: bool = False
    """Report if parameters or gradients are read so early that nothing can be deferred."""
    plans_norm: bool = False
    """Report as soon as every step asks for a norm, which can be planned for."""

    @property
    def is_steady(self) -> bool:
        """Whether measuring is over: it lasts until something changes."""
        return self.iterations == 0

    @property
    def observes_one_more(self) -> bool:
        """Whether another iteration must begin before the last one is completely observed.

        The end of an iteration, after its backward pass, is observed when the next one begins. If
        all iterations are observed alike, the last one is assumed to end as the one before did.
        """
        return self.record or len(self.turns) > 1


class Probe(Value, frozen=True, kw_only=True, tag=True):
    """A measurement of the network between two iterations."""

    iteration_s: float  # seconds of an iteration, which determine how long the probe may take
    contention: bool  # guess contention: no iterations will show it


Step = Stage | Probe


class Deferring(NamedTuple):
    """Whether updates can wait for the next forward pass, as rank 0 sees it."""

    can_defer: bool = False
    why_not: str | None = None  # why all updates are synchronous, if they are
    was_asked: bool = False  # whether an optimizer was, or will be, given to ``overlap``
    sharded: bool = False  # whether each rank updates a share of the parameters


class Typical(NamedTuple):
    """The medians over the ranks of each rank's median and its standard error."""

    value_s: float
    error_s: float


class Measurement(Value, frozen=True, kw_only=True):
    """What all ranks measured in a step, the same on each of them."""

    times_s: tuple[float, ...] = ()  # seconds of each iteration: the median over the ranks
    passes_s: tuple[float, ...] = ()
    """Seconds of the forward and backward pass of each observed iteration."""
    computing: Typical | None = None
    """Forward plus backward pass as the reducer timed them, if it did on every rank."""
    active: Typical | None = None
    """Time in which a worker was not waiting for the engine's messages or for buffers."""
    broadcast_s: float = 0.0  # how long DDP broadcast buffers: the longest of the ranks' medians
    profile: Profile | None = None  # what was observed, in a stage with turns
    network: Network | None = None
    mismatch: str | None = None
    """How the reducer's buckets differed from the plan, if they did on any rank."""
    read_early: str | None = None
    """Why almost no communication overlapped forward passes, if so on any rank."""
    norm: Norm | None = None
    """A norm of the gradients that every step asked for, if the plan does not exchange it."""
    drifted: bool = False  # whether computation or communication has changed for good
    slower: bool = False  # whether iterations take longer than those of the DDP baseline did
    deferring: Deferring = Deferring()

    def rate(self, name: str) -> Rate:
        """Return the typical iteration and its error."""
        iteration_s, noise_s = typical(self.times_s)
        iterations = len(self.times_s)
        return Rate(name=name, iteration_s=iteration_s, noise_s=noise_s, iterations=iterations)

    def slowdown_s(self, profile: Profile) -> float | None:
        """Return how much longer forward and backward pass took than the profile says, seconds.

        0 if they were slower by noise alone, which is limited to :data:`MOST_NOISE`; the profile's
        error is assumed to equal that of the stage. Negative if they were faster, however little:
        iterations with messages are what is to be predicted. None if some rank's reducer has not
        timed them.
        """
        if self.computing is None:
            return None
        value_s, error_s = self.computing
        noise_s = math.sqrt(2) * min(error_s, MOST_NOISE * value_s)
        slowdown_s = value_s - last_batch_s(profile)
        return 0.0 if 0 < slowdown_s <= CONFIDENCE * noise_s else slowdown_s

    def active_slowdown_s(self, profile: Profile, *, broadcast_s: float) -> float | None:
        """Return the seconds by which the engine's messages lengthen a worker's computing.

        None if some rank's iterations were not timed. ``broadcast_s`` is the part of the profile
        that was spent waiting for buffers.
        """
        if self.active is None:
            return None
        alone_s = math.fsum(o.duration_s for o in profile.operations if o.name != WAIT)
        return self.active.value_s - (alone_s - broadcast_s)


def last_batch_s(profile: Profile) -> float:
    """Return how long the passes of the last micro-batch take, which the reducer times."""
    names = [operation.name for operation in profile.operations]
    first = names.index(ACCUMULATING) + 1 if ACCUMULATING in names else 0
    last = profile.operations[first:]
    return math.fsum(o.duration_s for o in last if o.phase in COMPUTING)


class Findings(Value, frozen=True, kw_only=True):
    """What is known, expected and decided by now."""

    profile: Profile | None = None
    network: Network | None = None
    plan: Plan | None = None  # the plan whose messages run; None for DDP's buckets
    baseline: Rate | None = None
    hook: Rounded | None = None  # the type of torch's hook in the DDP baseline; None: no hook
    planned: Rate | None = None  # the plan, as measured when it was decided on
    comparison: Comparison | None = None
    costs: Network | None = None
    """The costs of the plan's messages if these are compressed; otherwise see :attr:`network`."""
    predicted_baseline_s: float | None = None
    predicted_planned_s: float | None = None
    decision: Decision = "undecided"
    reason: str = "training ended before the measurement did"

    def running_plan(self, ddp: Ddp) -> Plan | None:
        """Return the plan that runs, for DDP's buckets too; None before there is a profile."""
        if self.plan is not None or self.profile is None or self.network is None:
            return self.plan
        baseline = ddp.plan(self.profile, self.network)
        return baseline if self.hook is None else compressed(baseline, self.hook)

    def predicted_timeline(self, ddp: Ddp) -> Timeline | None:
        """Return the predicted timeline of the running plan, if there is a prediction."""
        plan = self.running_plan(ddp)
        if self.comparison is None or self.profile is None or self.network is None or plan is None:
            return None
        return predict(self.profile, self.costs or self.network, plan).timeline


class LogLine(NamedTuple):
    """A line to log."""

    text: str
    level: int
    is_for_users: bool = False  # whether users who have not configured logging are to see it, too


class Notebook:
    """The latest findings, and lines to log, which are removed by the caller that logs them."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.log_lines: list[LogLine] = []

    def find(self, **found: object) -> None:
        """Note findings, by name."""
        self.findings = replace(self.findings, **found)

    def say(self, text: str, level: int = logging.INFO, *, is_for_users: bool = False) -> None:
        """Add a line to log."""
        self.log_lines.append(LogLine(text, level, is_for_users))
