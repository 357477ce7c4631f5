"""``RankMeasurements``: profile and network of a wrapped module, measured by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from syncline.errors import SynclineError, UserError
from syncline.measure.exchange import gather_json, share_json
from syncline.measure.observer import ObservedIteration
from syncline.measure.probe import LARGEST_BYTES, SMALLEST_BYTES, probe
from syncline.measure.profiler import (
    across_ranks,
    profile_from_trace,
    unpack_seconds,
)
from syncline.measure.segments import ACCUMULATING, SegmentTrace, median_trace
from syncline.measure.statistics import median, typical
from syncline.model.network import Network
from syncline.model.plan import Message, Plan
from syncline.model.profile import COMPUTING, WAIT, Norm, Profile
from syncline.model.quantities import NS_PER_S
from syncline.model.recipe import Compression
from syncline.model.run import Rate
from syncline.parallel.engine.recording import Recorded
from syncline.parallel.wrapped import Wrapped
from syncline.planners.auto import CONFIDENCE, Auto
from syncline.planners.ddp import Ddp
from syncline.planners.wfbp import Single

PROBE_ITERATIONS = 2.0
"""Iterations that the sweeps of the network probe may take."""
PROBE_S = 0.5
"""Seconds that the sweeps may take at most."""


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
    ddp: Ddp = field(default_factory=Ddp)
    """DDP's own buckets under the user's arguments."""


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
    """Observe in turns: nothing, gradients and modules, every operation."""
    record: bool = False
    """Record when each bucket is issued and complete, through a communication hook."""


@dataclass(slots=True, kw_only=True)
class StageResult:
    """What this rank measured in a stage."""

    iteration_s: list[float] = field(default_factory=list)
    lean: list[SegmentTrace] = field(default_factory=list)
    detailed: list[SegmentTrace] = field(default_factory=list)
    quiet_ns: list[int] = field(default_factory=list)
    """Durations of iterations in which nothing was observed."""
    recorded: list[tuple[ObservedIteration, Recorded]] = field(default_factory=list)
    computing_s: list[float] = field(default_factory=list)
    """Seconds of forward and backward pass together, of iterations that the reducer has timed."""
    busy_s: list[float] = field(default_factory=list)
    """Seconds of each iteration in which a processor waited neither for the engine's messages nor
    for buffers."""
    broadcast_s: list[float] = field(default_factory=list)
    """Seconds of each iteration in which DDP broadcast buffers."""
    mismatch: str | None = None
    """How the reducer's buckets differed from the plan, if they did."""
    flushed: str | None = None
    """Why hardly any message ran during forward passes, if so."""
    norm: Norm | None = None
    """A norm of the gradients that every step asked for, if the plan does not exchange it."""
    drifted: bool = False
    """Whether the ranks agree that computation or communication has changed for good."""
    slower: bool = False
    """Whether they agree that iterations take longer than those of stock DDP did."""

    def add(self, before: StageResult) -> None:
        """Take in the times that were measured before under the same messages."""
        for name in ("iteration_s", "computing_s", "busy_s", "broadcast_s"):
            getattr(self, name).extend(getattr(before, name))


class RankMeasurements:
    """Measurements that all ranks make together; all get the same results."""

    def __init__(self, job: Wrapped) -> None:
        self._job = job
        self.rank = dist.get_rank(job.group)
        self.workers = dist.get_world_size(job.group)
        self.gradient_bytes = sum(p.nbytes for p in job.parameters.values())

    def rate(self, name: str, result: StageResult) -> Rate:
        """Return the median over the ranks of each rank's median and its error."""
        typical = self._typical(result.iteration_s)
        assert typical is not None
        iteration_s, noise_s = typical
        iterations = len(result.iteration_s)
        return Rate(name=name, iteration_s=iteration_s, noise_s=noise_s, iterations=iterations)

    def _typical(self, times_s: Sequence[float]) -> tuple[float, float] | None:
        """Return the medians of all ranks' medians and errors; None if a rank has no times."""
        everyone = self.gather([*typical(times_s)] if times_s else None)
        if None in everyone:
            return None
        value_s, error_s = map(median, zip(*everyone, strict=True))
        return value_s, error_s

    def excess_s(self, result: StageResult, profile: Profile) -> float | None:
        """Return how much longer forward and backward pass took than the profile says, seconds.

        0 where they were slower by noise alone; the profile's error counts as large as that of the
        stage. Negative where they were faster beside messages than alone, however little: it is
        these iterations that are to be predicted.
        None if some rank's reducer has not timed them.
        """
        typical = self._typical(result.computing_s)
        if typical is None:
            return None
        excess_s = typical[0] - last_batch_s(profile)
        noise_s = math.sqrt(2) * typical[1]
        return 0.0 if 0 < excess_s <= CONFIDENCE * noise_s else excess_s

    def broadcast_s(self, result: StageResult) -> float:
        """Return how long DDP broadcast buffers, seconds: the longest of the ranks' medians."""
        everyone: list[float] = self.gather(median(result.broadcast_s or [0.0]))
        return max(everyone)

    def busy_excess_s(
        self, result: StageResult, profile: Profile, *, broadcast_s: float
    ) -> float | None:
        """Return the seconds that a worker computed longer beside the engine's messages than alone.

        The median over the ranks; None if some rank's iterations were not timed. ``broadcast_s`` is
        the share of the profile in which it waited for buffers.
        """
        typical = self._typical(result.busy_s)
        if typical is None:
            return None
        alone_s = math.fsum(o.duration_s for o in profile.operations if o.name != WAIT)
        return typical[0] - (alone_s - broadcast_s)

    def network(self, iteration_s: float, *, contention: bool = False) -> Network:
        """Probe the network with messages up to the size of all gradients.

        Contention is only guessed where no iterations will tell it.
        """
        largest = min(max(self.gradient_bytes, SMALLEST_BYTES * 16), LARGEST_BYTES)
        found = probe(
            self._job.group,
            device=self._job.device,
            largest_bytes=1 << (largest - 1).bit_length(),
            seconds=min(iteration_s * PROBE_ITERATIONS, PROBE_S),
            pipelined=self._job.can_defer,
            contention=contention,
        )
        return Network.from_json(self.shared(found.to_json))

    def profile(self, result: StageResult, network: Network) -> Profile:
        """Build the profile from iterations in which everything was sent after the last gradient.

        The time between the last gradient and the update is the exchange. The network explains a
        part of it; the rest is waiting for the slowest worker and unpacking the buckets, which
        every plan has.
        """
        job = self._job
        own = median_trace(result.lean, result.detailed, result.quiet_ns)
        trace = across_ranks(own, job.group, job.device)
        unpack_s = 0.0 if job.wants_views else unpack_seconds(job.parameters)
        exchange_ns = sum(s.duration_ns for s in trace.segments if s.phase == "finalize")
        explained_s = unpack_s + network.all_reduce.seconds(self.gradient_bytes)
        waiting_s = max(exchange_ns / NS_PER_S - explained_s, 0.0)

        def build() -> str:
            return profile_from_trace(
                trace,
                job.module,
                name=type(job.module).__name__,
                workers=self.workers,
                iterations=len(result.lean),
                exchange=(
                    (WAIT, waiting_s),
                    ("unpack gradients", unpack_s),
                ),
            ).to_json()

        return Profile.from_json(self.shared(build))

    def everything_at_once(self) -> Plan:
        """Return the plan with one message, which needs no measurement."""
        tensors = tuple(reversed(self._job.tensors()))
        return Plan(
            planner=Single.NAME,
            model=type(self._job.module).__name__,
            workers=self.workers,
            tensors=tensors,
            messages=(Message(start=0, stop=sum(t.elements for t in tensors)),),
        )

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value; JSON must be able to hold it."""
        return gather_json(value, self._job.group, self._job.device)

    def shared(self, conclude: Callable[[], Any]) -> Any:
        """Return on every rank what rank 0 concludes; raise its error as a UserError on each."""
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome = {"value": conclude()}
            except SynclineError as error:
                outcome = {"error": str(error)}
        outcome = share_json(outcome, self._job.group, self._job.device)
        if "error" in outcome:
            raise UserError(f"rank 0 could not plan: {outcome['error']}")
        return outcome["value"]


def last_batch_s(profile: Profile) -> float:
    """Return how long the passes of the last micro-batch take, which the reducer times."""
    names = [operation.name for operation in profile.operations]
    first = names.index(ACCUMULATING) + 1 if ACCUMULATING in names else 0
    last = profile.operations[first:]
    return math.fsum(o.duration_s for o in last if o.phase in COMPUTING)
