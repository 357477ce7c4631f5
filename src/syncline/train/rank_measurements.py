"""``RankMeasurements``: profile and network of a wrapped module, measured by all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch.distributed as dist

from syncline.errors import InternalError, SynclineError, UserError, shortened
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.compressed import compressing
from syncline.plan.planners.dtypes import apart
from syncline.plan.planners.wfbp import Single
from syncline.plan.profile import COMPUTING, WAIT, Norm, Profile
from syncline.plan.quantities import NS_PER_S
from syncline.plan.simulator.messages import message_costs_ns
from syncline.train.engine.layout import needs_engine
from syncline.train.engine.recording import Recorded
from syncline.train.measure.exchange import gather_json, share_json
from syncline.train.measure.observer import ObservedIteration
from syncline.train.measure.probe import LARGEST_BYTES, SMALLEST_BYTES, probe
from syncline.train.measure.profiler import across_ranks, profile_from_trace, unpack_seconds
from syncline.train.measure.segments import SegmentTrace, median_trace
from syncline.train.measure.statistics import median, typical
from syncline.train.stages import Findings, Measurement, Settings, Stage, Typical
from syncline.train.wrapped import Wrapped

PROBE_ITERATIONS = 2.0
PROBE_S = 0.5
"""The sweeps of the network probe may take this many iterations, and at most these seconds."""
PROBED_SHARE = 0.7
LEAST_PROBE_S = 0.3
"""The whole probe may take this share of an iteration, or this long if that is longer."""


@dataclass(slots=True, kw_only=True)
class StageResult:
    """What this rank measured: lists by iteration of a stage, then values for the whole stage.

    :class:`Measurement`, which is that of all ranks, says what the fields mean.
    """

    iteration_s: list[float] = field(default_factory=list)
    lean: list[SegmentTrace] = field(default_factory=list)
    detailed: list[SegmentTrace] = field(default_factory=list)
    quiet_ns: list[int] = field(default_factory=list)
    """Durations of iterations in which nothing was observed."""
    recorded: list[tuple[ObservedIteration, Recorded]] = field(default_factory=list)
    computing_s: list[float] = field(default_factory=list)
    active_s: list[float] = field(default_factory=list)
    broadcast_s: list[float] = field(default_factory=list)
    mismatch: str | None = None
    read_early: str | None = None
    norm: Norm | None = None
    drifted: bool = False  # the same on all ranks already, as is ``slower``
    slower: bool = False


class RankMeasurements:
    """Measurements that all ranks make together; all get the same results."""

    def __init__(self, job: Wrapped) -> None:
        self._job = job
        self.rank = dist.get_rank(job.group)
        self.workers = dist.get_world_size(job.group)

    def measurement(
        self, stage: Stage, result: StageResult, settings: Settings, findings: Findings
    ) -> Measurement:
        """Return what all ranks measured in a stage."""
        own = {
            "times_s": result.iteration_s,
            "passes_s": [
                sum(s.duration_ns for s in trace.segments if s.phase in COMPUTING) / NS_PER_S
                for trace in result.lean or result.detailed
            ],
            "computing": typical(result.computing_s) if result.computing_s else None,
            "active": typical(result.active_s) if result.active_s else None,
            "broadcast_s": median(result.broadcast_s or [0.0]),
            "mismatch": result.mismatch,
            "read_early": result.read_early,
            "norm": result.norm,
        }
        everyone = gather_json(own, self._job.group, self._job.device)

        def any_of(name: str) -> Any:
            return next((ranks[name] for ranks in everyone if ranks[name] is not None), None)

        def medians(name: str) -> tuple[float, ...]:
            return tuple(map(median, zip(*(ranks[name] for ranks in everyone), strict=False)))

        def typical_of(name: str) -> Typical | None:
            found = [ranks[name] for ranks in everyone]
            return None if None in found else Typical(*map(median, zip(*found, strict=True)))

        profile = None
        if stage.turns and not stage.record:
            network = findings.network or settings.network
            assert network is not None
            assert stage.plan is not None
            if stage.plan.is_lossy:
                assert settings.compression is not None
                network = compressing(network, settings.compression)
            sent_s = sum(message_costs_ns(network, stage.plan)) / NS_PER_S
            profile = self._profile(result, sent_s, unpacked=not needs_engine(stage.plan))
        return Measurement(
            times_s=medians("times_s"),
            passes_s=medians("passes_s"),
            computing=typical_of("computing"),
            active=typical_of("active"),
            broadcast_s=max(ranks["broadcast_s"] for ranks in everyone),
            profile=profile,
            mismatch=any_of("mismatch"),
            read_early=any_of("read_early"),
            norm=any_of("norm"),
            drifted=result.drifted,
            slower=result.slower,
            deferring=self._job.deferring,
        )

    def network(self, iteration_s: float, *, contention: bool = False) -> Network:
        """Probe the network with messages up to the size of all gradients."""
        gradient_bytes = sum(p.nbytes for p in self._job.parameters.values())
        largest = min(max(gradient_bytes, SMALLEST_BYTES * 16), LARGEST_BYTES)
        found = probe(
            self._job.group,
            device=self._job.device,
            largest_bytes=1 << (largest - 1).bit_length(),
            seconds=min(iteration_s * PROBE_ITERATIONS, PROBE_S),
            pipelined=self._job.can_defer,
            contention=contention,
            limit_s=max(PROBED_SHARE * iteration_s, LEAST_PROBE_S),
        )
        return Network.from_json(self.shared(found.to_json))

    def _profile(self, result: StageResult, sent_s: float, *, unpacked: bool) -> Profile:
        """Build the profile from iterations in which everything was sent after the last gradient.

        From there to the update, messages take ``sent_s``. The rest is waiting for the slowest
        worker and, if ``unpacked``, unpacking the buckets, as DDP does.
        """
        job = self._job
        own = median_trace(result.lean or result.detailed, result.detailed, result.quiet_ns)
        trace = across_ranks(own, job.group, job.device)
        unpack_s = 0.0 if job.wants_views else unpack_seconds(job.parameters)
        exchange_ns = sum(s.duration_ns for s in trace.segments if s.phase == "finalize")
        explained_s = sent_s + (unpack_s if unpacked else 0.0)
        waiting_s = max(exchange_ns / NS_PER_S - explained_s, 0.0)

        def build() -> str:
            return profile_from_trace(
                trace,
                job.module,
                name=type(job.module).__name__,
                workers=self.workers,
                iterations=len(result.lean or result.detailed),
                exchange=((WAIT, waiting_s), ("unpack gradients", unpack_s)),
            ).to_json()

        return Profile.from_json(self.shared(build))

    def single_message_plan(self) -> Plan:
        """Return the plan with one message, which needs no measurement.

        Of several dtypes each has one. All follow that of the module's first parameter, whose
        gradient is most likely the last to be ready.
        """
        tensors = tuple(reversed(self._job.tensors()))
        stops = [sum(tensor.elements for tensor in tensors)]
        model = type(self._job.module).__name__
        plan = apart(Plan.cut(Single.NAME, model, self.workers, tensors, stops))
        last = plan.tensors.index(tensors[-1])
        members = zip(plan.messages, plan.message_tensors(), strict=True)
        messages = sorted(members, key=lambda member: last not in member[1])
        return msgspec.structs.replace(plan, messages=tuple(message for message, _ in messages))

    def shared(self, conclude: Callable[[], Any]) -> Any:
        """Return rank 0's result of ``conclude`` on every rank, or raise on every rank.

        If rank 0 alone raised, the others would wait until the group's timeout. A SynclineError
        becomes a UserError on all ranks. Rank 0 re-raises any other error, and the others raise
        InternalError.
        """
        outcome: dict[str, Any] = {}
        bug: Exception | None = None
        if self.rank == 0:
            try:
                outcome = {"value": conclude()}
            except SynclineError as error:
                outcome = {"error": str(error)}
            except Exception as error:
                bug = error
                outcome = {"bug": f"{type(error).__name__}: {shortened(str(error))}"}
        outcome = share_json(outcome, self._job.group, self._job.device)
        if bug is not None:
            raise bug
        if "bug" in outcome:
            raise InternalError(
                f"rank 0 failed while it planned: {outcome['bug']}; please report this with rank "
                "0's traceback. To train without a plan, use torch's DistributedDataParallel"
            )
        if "error" in outcome:
            raise UserError(f"rank 0 could not plan: {outcome['error']}")
        return outcome["value"]
