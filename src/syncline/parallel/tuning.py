"""What to measure, in which order, and what to conclude: the script of a training run's start.

The script is a generator: it yields the :class:`Stage` to train under next and is sent what was
measured there. All ranks run it in step. Whatever decides is measured on every rank, concluded on
rank 0 and shared, so that no two ranks can ever disagree on the buckets.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import SynclineError, UserError
from syncline.measure.clock import Clock
from syncline.measure.exchange import gather_json, share_json
from syncline.measure.probe import LARGEST_BYTES, SMALLEST_BYTES, probe
from syncline.measure.profiler import (
    across_ranks,
    dtype_name,
    profile_from_trace,
    trainable_parameters,
    unpack_seconds,
)
from syncline.measure.segments import median_trace
from syncline.measure.statistics import median, standard_error
from syncline.model.network import Network
from syncline.model.plan import Message, Plan, Tensor
from syncline.model.prediction import Comparison
from syncline.model.profile import Baseline, Profile
from syncline.model.run import Decision, Event, Rate
from syncline.model.timeline import Timeline
from syncline.parallel.recording import measured_timeline
from syncline.parallel.stages import Stage, StageResult
from syncline.planners.auto import CONFIDENCE, Auto, choose
from syncline.planners.ddp import Ddp
from syncline.planners.single import Single
from syncline.simulator.contention import calibrate_contention
from syncline.simulator.predict import predict

__all__ = ["Job", "Settings", "Tuning"]

logger = logging.getLogger("syncline")

Script = Generator[Stage, StageResult, None]

WARMUP = 3
BASELINE_ITERATIONS = 16
PROFILED_ITERATIONS = 9
TRIAL_ITERATIONS = 16
RECORDED_ITERATIONS = 3
TRIALS = 2
"""At most this many plans are tried: the second after the first has shown the contention."""
PROBE_SHARE = 0.05
"""Seconds that one size of the network probe may take, as a share of an iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for."""

    planner: str
    plan: Plan | None
    profile: Profile | None
    network: Network | None
    check: bool
    ddp: Ddp
    """DDP's own buckets under the user's arguments."""


class Job(Protocol):
    """What the script needs to know of the training job."""

    group: dist.ProcessGroup
    device: torch.device
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    clock: Clock
    gradients_are_views: bool


class _Trial(NamedTuple):
    plan: Plan
    rate: Rate
    predicted_s: float | None


class Tuning:
    """The state of the script, and the script."""

    def __init__(self, job: Job, settings: Settings) -> None:
        self._job = job
        self._settings = settings
        self.rank = dist.get_rank(job.group)
        self.workers = dist.get_world_size(job.group)
        self.profile = settings.profile
        self.network = settings.network
        self.comparison: Comparison | None = None
        self.plan: Plan | None = None
        """The plan whose messages run now; None for DDP's own buckets."""
        self.baseline: Rate | None = None
        self.planned: Rate | None = None
        self.predicted_baseline_s: float | None = None
        self.predicted_planned_s: float | None = None
        self.predicted_timeline: Timeline | None = None
        self.measured_timeline: Timeline | None = None
        self.decision: Decision = "undecided"
        self.reason = "training ended before the measurement did"
        self.events: list[Event] = []
        self.iteration = 0

    def script(self) -> Script:
        """Measure, plan, try, decide, record, and train on; again when told that things changed."""
        while True:
            yield from self._decide()
            yield from self._record()
            yield Stage(name="steady", plan=self.plan, warmup=2, iterations=0)
            self._say("computation or communication has drifted; measuring and planning again")
            self.plan = None

    def _decide(self) -> Script:
        settings = self._settings
        if settings.plan is not None and not settings.check:
            self._conclude("planned", settings.plan, "the plan was given, unchecked")
            return
        result = yield Stage(
            name="baseline", plan=None, warmup=WARMUP, iterations=BASELINE_ITERATIONS
        )
        self.baseline = self._rate("stock DDP", result)
        if settings.plan is None:
            yield from self._measure()
            assert self.profile is not None
            assert self.network is not None
        plan = settings.plan or self._choose([])
        trials: list[_Trial] = []
        while plan is not None and len(trials) < TRIALS:
            predicted_s = self._predicted_s(plan)
            result = yield Stage(
                name=f"trying {plan.planner}", plan=plan, warmup=2, iterations=TRIAL_ITERATIONS
            )
            mismatch = self._shared(functools.partial(getattr, result, "mismatch"))
            if mismatch is not None:
                self._conclude("ddp", None, f"DDP would not take the plan's messages ({mismatch})")
                return
            trials.append(_Trial(plan, self._rate(plan.planner, result), predicted_s))
            tried = {trial.plan.planner for trial in trials}
            plan = None
            if settings.plan is None and settings.planner == Auto.NAME:
                candidate = self._choose([(t.plan, t.rate.iteration_s) for t in trials])
                best_s = min(trial.rate.iteration_s for trial in trials)
                if (
                    candidate is not None
                    and candidate.planner not in tried
                    and (self._predicted_s(candidate) or best_s) < best_s - self._noise_s()
                ):
                    plan = candidate
        if trials and settings.check and self._loss_s(trials) > 0:
            # Before a plan is dropped, DDP's own buckets are measured again: the machine itself
            # may have become slower since.
            result = yield Stage(
                name="checking again", plan=None, warmup=2, iterations=BASELINE_ITERATIONS
            )
            self.baseline = self._rate("stock DDP", result)
        self._judge(trials)

    def _loss_s(self, trials: list[_Trial]) -> float:
        """Return by how much the best trial is slower than stock DDP beyond noise, in seconds."""
        assert self.baseline is not None
        best = min(trials, key=lambda trial: trial.rate.iteration_s).rate
        noise_s = CONFIDENCE * math.hypot(best.noise_s, self.baseline.noise_s)
        return best.iteration_s - self.baseline.iteration_s - noise_s

    def _judge(self, trials: list[_Trial]) -> None:
        """Keep the best plan that was tried, unless DDP's own buckets were faster."""
        assert self.baseline is not None
        if not trials:
            assert self.comparison is not None
            self._conclude("ddp", None, self.comparison.reason)
            return
        best = min(trials, key=lambda trial: trial.rate.iteration_s)
        self.planned = best.rate
        self.predicted_planned_s = best.predicted_s
        noise_s = CONFIDENCE * math.hypot(best.rate.noise_s, self.baseline.noise_s)
        figures = (
            f"{best.plan.planner} took {best.rate.iteration_s * 1e3:.2f} ms an iteration, stock "
            f"DDP {self.baseline.iteration_s * 1e3:.2f} ms (noise {noise_s * 1e3:.2f} ms)"
        )
        if self._settings.check and self._loss_s(trials) > 0:
            self._conclude("reverted", None, f"{figures}; back to DDP's own buckets")
        else:
            self._conclude("planned", best.plan, figures)

    def _conclude(self, decision: Decision, plan: Plan | None, reason: str) -> None:
        self.decision, self.plan, self.reason = decision, plan, reason
        self._say(reason, level=logging.WARNING if decision == "reverted" else logging.INFO)
        if self.profile is None or self.network is None:
            return
        running = plan or self._settings.ddp.plan(self.profile, self.network)
        forecast = predict(self.profile, self.network, running)
        self.predicted_timeline = forecast.timeline

    def _measure(self) -> Script:
        """Profile the computation undisturbed by communication, and probe the network."""
        assert self.baseline is not None
        profile, network = self._settings.profile, self._settings.network
        if profile is None:
            # One message after the last gradient: nothing is in flight while operations run.
            result = yield Stage(
                name="profiling",
                plan=self._everything_at_once(),
                warmup=2,
                iterations=PROFILED_ITERATIONS,
                observe=True,
            )
            network = network or self._probe()
            profile = self._build_profile(result, network)
        elif network is None:
            network = self._probe()
        if profile.baseline is None:
            baseline = Baseline(
                iteration_s=self.baseline.iteration_s,
                noise_s=self.baseline.noise_s,
                iterations=self.baseline.iterations,
            )
            profile = msgspec.structs.replace(profile, baseline=baseline)
        self.profile, self.network = profile, network

    def _probe(self) -> Network:
        assert self.baseline is not None
        total_bytes = sum(p.numel() * p.element_size() for p in self._job.parameters.values())
        largest = min(max(total_bytes, SMALLEST_BYTES * 16), LARGEST_BYTES)
        network = probe(
            self._job.group,
            device=self._job.device,
            largest_bytes=1 << (largest - 1).bit_length(),
            seconds_per_size=min(self.baseline.iteration_s * PROBE_SHARE, 0.05),
        )
        return Network.from_json(self._shared(network.to_json))

    def _build_profile(self, result: StageResult, network: Network) -> Profile:
        job = self._job
        trace = across_ranks(median_trace(result.lean, result.detailed), job.group, job.device)
        unpack_s = 0.0 if job.gradients_are_views else unpack_seconds(job.parameters)
        total_bytes = sum(p.numel() * p.element_size() for p in job.parameters.values())
        exchange_s = sum(s.duration_ns for s in trace.segments if s.phase == "finalize") / 1e9
        waiting_s = max(exchange_s - unpack_s - network.all_reduce.seconds(total_bytes), 0.0)

        def build() -> str:
            return profile_from_trace(
                trace,
                job.module,
                name=type(job.module).__name__,
                workers=self.workers,
                iterations=len(result.lean),
                exchange=(
                    ("wait for the slowest worker", waiting_s),
                    ("unpack gradients", unpack_s),
                ),
            ).to_json()

        return Profile.from_json(self._shared(build))

    def _choose(self, tried: list[tuple[Plan, float]]) -> Plan | None:
        """Return the plan to try next, or None if DDP's own buckets are the best guess."""

        def conclude() -> list[str]:
            assert self.profile is not None
            assert self.network is not None
            assert self.baseline is not None
            own = self._settings.ddp.plan(self.profile, self.network)
            measured = [(own, self.baseline.iteration_s), *tried]
            network = calibrate_contention(self.profile, self.network, measured)
            choice = choose(self.profile, network, ddp=self._settings.ddp)
            name = self._settings.planner
            chosen = choice.comparison.chosen if name == Auto.NAME else name
            comparison = msgspec.structs.replace(
                choice.comparison,
                chosen=chosen,
                reason=choice.comparison.reason if name == Auto.NAME else f"{name} was asked for",
            )
            plan = choice.plans[chosen]
            return [network.to_json(), comparison.to_json(), plan.to_json()]

        network, comparison, plan = self._shared(conclude)
        self.network = Network.from_json(network)
        self.comparison = Comparison.from_json(comparison)
        self.predicted_baseline_s = self.comparison.of(Ddp.NAME).iteration_s
        if self.comparison.chosen == Ddp.NAME:
            return None
        return Plan.from_json(plan)

    def _record(self) -> Script:
        """Record a few iterations under the final buckets for the measured timeline."""
        result = yield Stage(
            name="recording",
            plan=self.plan,
            warmup=2,
            iterations=RECORDED_ITERATIONS,
            observe=True,
            record=True,
        )
        if self.profile is None or self.network is None or not result.recorded:
            return
        running = self.plan or self._settings.ddp.plan(self.profile, self.network)
        timelines = [
            measured_timeline(iteration, exchanges, running, self._job.clock)
            for iteration, exchanges in result.recorded
            if len(exchanges) == len(running.messages)
        ]
        timelines.sort(key=lambda timeline: timeline.iteration_ns)
        if timelines:
            self.measured_timeline = timelines[len(timelines) // 2]

    def _predicted_s(self, plan: Plan) -> float | None:
        if self.profile is None or self.network is None:
            return None
        return predict(self.profile, self.network, plan).prediction.iteration_s

    def _noise_s(self) -> float:
        assert self.baseline is not None
        return CONFIDENCE * self.baseline.noise_s

    def _everything_at_once(self) -> Plan:
        tensors = tuple(
            Tensor(name=name, elements=p.numel(), dtype=dtype_name(p.dtype))
            for name, p in reversed(list(trainable_parameters(self._job.module).items()))
            if name in self._job.parameters
        )
        return Plan(
            planner=Single.NAME,
            model=type(self._job.module).__name__,
            workers=self.workers,
            tensors=tensors,
            messages=(Message(start=0, stop=sum(t.elements for t in tensors)),),
        )

    def _rate(self, name: str, result: StageResult) -> Rate:
        """Return the median over the ranks of each rank's median and its error."""
        mine = [median(result.iteration_s), standard_error(result.iteration_s)]
        everyone = gather_json(mine, self._job.group, self._job.device)
        return Rate(
            name=name,
            iteration_s=median([value for value, _ in everyone]),
            noise_s=median([error for _, error in everyone]),
            iterations=len(result.iteration_s),
        )

    def _shared(self, conclude: Callable[[], Any]) -> Any:
        """Return what rank 0 concludes, on every rank; its error too, so that nobody waits."""
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

    def _say(self, text: str, level: int = logging.INFO) -> None:
        self.events.append(Event(iteration=self.iteration, text=text))
        if self.rank == 0:
            logger.log(level, "iteration %d: %s", self.iteration, text)
