"""``Tuning``: what to measure, in which order, and what to conclude.

``Tuning.stages`` is a generator: it yields the :class:`Stage` to train under next and is sent what
was measured there. All ranks run it in step. Every decision is measured on every rank, made on rank
0 and shared, so ranks can never disagree on the buckets.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Generator, Sequence
from typing import NamedTuple, Self

import msgspec

from syncline.measure.statistics import median
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.prediction import Comparison
from syncline.model.profile import COMPUTING, Baseline, Norm, Profile
from syncline.model.quantities import NS_PER_S
from syncline.model.recipe import Compression
from syncline.model.run import Decision, Event, Rate
from syncline.model.timeline import Timeline
from syncline.parallel.engine.layout import needs_engine
from syncline.parallel.engine.recording import recorded_timeline
from syncline.parallel.forecasts import Forecasts, forecast
from syncline.parallel.log import logger
from syncline.parallel.rank_measurements import (
    RankMeasurements,
    Settings,
    Stage,
    StageResult,
)
from syncline.parallel.watches import FlushWatch
from syncline.parallel.wrapped import Wrapped
from syncline.planners.auto import CONFIDENCE, Auto
from syncline.planners.compressed import compressed, compressing
from syncline.planners.ddp import Ddp
from syncline.planners.halves import in_equal_parts
from syncline.simulator.contention import MANY, Measured, as_under_stock

Stages = Generator[Stage, StageResult, None]

WARMUP = 3
REBUILT = 2
"""Iterations after a change of buckets: DDP makes the final ones after the first."""
DEFERRED = REBUILT + 1
"""The same where updates are deferred: until one begins with an update that is due."""
COMPARED_ITERATIONS = 16
"""Iterations of the baseline and of a trial, at least."""
COMPARED_S = 1.5
COMPARED_NOISE = 0.01
MOST_COMPARED_ITERATIONS = 48
"""Short or uneven iterations are compared over this time, and until the standard error of their
median would be this share of it, up to so many. A plan's can be more uneven than stock DDP's."""
PROFILED_ITERATIONS = 18
OTHER_ORDER = (
    "gradients become ready in another order than the plan's. Activation checkpointing may change "
    "it: profile the model as it trains, or leave plan and profile out; or pass "
    "find_unused_parameters=True, with which DDP keeps the plan's order"
)
RECORDED_ITERATIONS = 3
EXPLORED_PARTS = (4, 12)
"""Messages, in halves if there is a norm, under which the engine is measured before planning: few
and many show what each takes from computing. DDP's reducer is measured under the many only, or
under more if stock DDP has as many."""
EXPLORED_GAIN = 0.05
"""Share of an iteration that overlapping must gain, if it cost nothing, to be measured then."""
TRIALS = 3
"""At most this many plans are tried: another when the one before has taught something."""


class _Trial(NamedTuple):
    plan: Plan
    rate: Rate
    forecasts: Forecasts | None
    """What was expected before the plan was tried; None where the plan was given."""
    excess_s: float | None = None
    """How much longer a worker computed than in the profile, seconds; None: not measured."""

    def measured(self) -> Measured:
        noise_s = CONFIDENCE * self.rate.noise_s
        return Measured(self.plan, self.rate.iteration_s, noise_s, self.excess_s)


class Tuning:
    """The decisions so far, and the stages that lead to the next ones."""

    def __init__(self, job: Wrapped, settings: Settings) -> None:
        self._job = job
        self._settings = settings
        self._measurements = RankMeasurements(job)
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
        self._compared = COMPARED_ITERATIONS
        self._broadcast_s = 0.0
        """What a broadcast of buffers takes where nothing else is under way."""
        self._resumed: tuple[Plan | None] | None = None
        """What a checkpoint says is to run, until it does."""
        self._forecasts: Forecasts | None = None
        """What was expected of the plan that runs, before it was tried."""
        self._norm: Norm | None = None if settings.profile is None else settings.profile.norm
        """What every update waits for, as far as known."""
        self._flushes = FlushWatch(job, self._measurements.gather, self._say, heed=settings.check)

    @property
    def can_revert(self) -> bool:
        """Whether a plan runs that is dropped if it turns out to be slower than stock DDP."""
        return self._settings.check and self.plan is not None

    @property
    def watches_flushes(self) -> bool:
        """Whether it matters that nothing is left to run under forward passes."""
        return self._flushes.watches

    @property
    def running_plan(self) -> Plan | None:
        """The plan that runs, or DDP's own buckets as a plan; None before there is a profile."""
        if self.plan is not None or self.profile is None or self.network is None:
            return self.plan
        return self._settings.ddp.plan(self.profile, self.network)

    @property
    def _known(self) -> tuple[bool, Norm | None]:
        """What training under a plan may show of the program: whether it defers, for which norm."""
        return self._flushes.defers, self._norm

    def snapshot(self) -> Self:
        """Return a copy that later decisions do not change."""
        now = copy.copy(self)
        now.events = list(self.events)
        return now

    def stages(self) -> Stages:
        """Measure, plan, try, decide, record, and train on; once more after a change."""
        while True:
            yield from self._decide()
            yield from self._record()
            while True:
                steady = Stage(
                    name="steady", plan=self.plan, warmup=_warmup(self.plan), iterations=0
                )
                result = yield steady
                if self._learns_norm(result) or self._flushes.gives_up(result):
                    break
                if result.drifted:
                    self._say(
                        "computation or communication has drifted; measuring and planning again"
                    )
                    break
                if result.slower and self.plan is not None:
                    self._say(
                        f"{self.plan.planner} takes longer than stock DDP did; measuring both again"
                    )
                    rate = self._measurements.rate(self.plan.planner, result)
                    yield from self._judge_again(_Trial(self.plan, rate, self._forecasts))
                    yield from self._record()

    def _decide(self) -> Stages:
        settings = self._settings
        if self._resumed is not None:
            (plan,), self._resumed = self._resumed, None
            if plan is None:
                reason = "the checkpoint was written after dense buckets had won"
                self._conclude("reverted", reason)
            else:
                plan = self._flushes.as_it_can_run(plan)
                self._conclude("planned", "the checkpoint's plan goes on, unchecked", plan=plan)
            return
        if settings.plan is not None and not settings.check:
            plan = self._flushes.as_it_can_run(settings.plan)
            self._conclude("planned", "the plan was given, unchecked", plan=plan)
            return
        if settings.compression is not None and not settings.check:
            yield from self._compress_unchecked(settings.compression)
            return
        if settings.plan is not None:
            yield from self._measure_baseline()
            deferred = self._flushes.defers
            trial = yield from self._try(self._flushes.as_it_can_run(settings.plan), None)
            if self._flushes.defers != deferred:
                trial = yield from self._try(self._flushes.as_it_can_run(settings.plan), None)
            yield from self._judge([trial], None)
            return
        # Stock DDP comes last: a program's first second is slower than the rest of it.
        profile, network = yield from self._measure()
        result = yield from self._measure_baseline()
        assert self.baseline is not None
        if profile.baseline is None:
            stock = Baseline(
                iteration_s=self.baseline.iteration_s,
                noise_s=self.baseline.noise_s,
                iterations=self.baseline.iterations,
            )
            profile = msgspec.structs.replace(profile, baseline=stock)
        excess_s = self._measurements.excess_s(result, profile)
        own = _Trial(settings.ddp.plan(profile, network), self.baseline, None, excess_s).measured()
        profile, network, own = as_under_stock(own, profile, network)
        self.profile, self.network = profile, network
        first = self._forecast(profile, network, [own])
        if first.held_back:
            self._flushes.say_held_back(settings.planner)
        while True:
            known, measured, trials = self._known, [own], []
            explored: list[list[Plan]] = [[]]
            # What is learnt of the engine may bring up a plan of the reducer.
            of_reducer, of_engine = self._to_explore_reducer, self._to_explore_engine
            dense = settings.compression is None
            for to_explore in (of_reducer, of_engine, of_reducer) if dense else ():
                plans = to_explore(first, network, own.plan) if self._known == known else []
                if plans not in explored:
                    explored.append(plans)
                    measured += yield from self._explore(plans)
                    first = self._forecast(profile, network, measured)
            if self._known == known:
                trials = yield from self._try_best(first, profile, network, measured)
            if self._known == known:
                break
            # Nothing of what was expected and tried can run any more: once more from here.
            profile = self.profile = msgspec.structs.replace(profile, norm=self._norm)
            first = self._forecast(profile, network, [own])
        yield from self._judge(trials, first)

    def resume(self, plan: Plan | None) -> None:
        """Go on under a checkpoint's plan, or DDP's own buckets; call before training begins."""
        self._resumed = (plan,)

    def _compress_unchecked(self, compression: Compression) -> Stages:
        """Compress from the first step on: measure under one message, plan, and train on."""
        profile, network = yield from self._measure(compression)
        forecasts = self._forecast(profile, network, [])
        if forecasts.held_back:
            self._flushes.say_held_back(self._settings.planner)
        self._conclude(
            "planned", forecasts.comparison.reason, plan=forecasts.plan, forecasts=forecasts
        )

    def _measure(
        self, compression: Compression | None = None
    ) -> Generator[Stage, StageResult, tuple[Profile, Network]]:
        """Profile the computation undisturbed by communication, and probe the network.

        With ``compression`` these iterations are compressed too, and none will tell contention.
        """
        profile, network = self._settings.profile, self._settings.network
        guesses = compression is not None
        if profile is None or (network is None and guesses):
            # One message after the last gradient: nothing is in flight while operations run.
            plan = self._measurements.everything_at_once()
            result = yield Stage(
                name="profiling",
                plan=plan if compression is None else compressed(plan, compression),
                warmup=WARMUP,
                iterations=PROFILED_ITERATIONS,
                observe=True,
            )
            # All ranks must probe for equally long.
            iteration_s = self._measurements.rate("profiling", result).iteration_s
            network = network or self._measurements.network(iteration_s, contention=guesses)
            costs = network if compression is None else compressing(network, compression)
            if profile is None:
                profile = self._measurements.profile(result, costs)
                profile = msgspec.structs.replace(profile, norm=self._norm)
        elif network is None:
            network = self._measurements.network(profile.phase_s(*COMPUTING))
        self.profile, self.network = profile, network
        return profile, network

    def _measure_baseline(self) -> Generator[Stage, StageResult, StageResult]:
        """Train under DDP's own buckets."""
        stage = Stage(name="baseline", plan=None, warmup=WARMUP, iterations=COMPARED_ITERATIONS)
        result = yield stage
        result = yield from self._go_on(stage, result)
        self.baseline = self._measurements.rate("stock DDP", result)
        self._compared = len(result.iteration_s)
        self._broadcast_s = self._measurements.broadcast_s(result)
        return result

    def _go_on(
        self, stage: Stage, result: StageResult
    ) -> Generator[Stage, StageResult, StageResult]:
        """Train under a stage's messages until their time is known well enough to compare it."""
        rate = self._measurements.rate(stage.name, result)
        iteration_s = max(rate.iteration_s, 1e-6)
        # The error falls with the square root of the number of iterations.
        noise = rate.noise_s / iteration_s / COMPARED_NOISE
        wanted = round(max(COMPARED_S / iteration_s, rate.iterations * noise**2))
        missing = min(wanted, MOST_COMPARED_ITERATIONS) - rate.iterations
        if missing <= 0:
            return result
        more = yield dataclasses.replace(stage, warmup=0, iterations=missing)
        more.add(result)
        return more

    def _forecast(self, profile: Profile, network: Network, measured: list[Measured]) -> Forecasts:
        return Forecasts.from_shared(
            profile,
            self._measurements.shared(
                lambda: forecast(
                    profile, network, self._settings, measured, defers=self._flushes.defers
                ).to_shared()
            ),
        )

    def _try(
        self, plan: Plan, forecasts: Forecasts | None, name: str = "trying"
    ) -> Generator[Stage, StageResult, _Trial | None]:
        """Train under a plan; None if the reducer refuses it, or if deferring was given up."""
        stage = Stage(
            name=f"{name} {plan.planner}",
            plan=plan,
            warmup=_warmup(plan),
            iterations=self._compared,
        )
        result = yield stage
        if self._mismatch(plan, result) or self._learns_of_reads(result):
            return None
        result = yield from self._go_on(stage, result)
        if self._learns_of_reads(result):
            return None
        rate = self._measurements.rate(plan.planner, result)
        excess_s = None
        if self.profile is not None and needs_engine(plan):
            excess_s = self._measurements.busy_excess_s(
                result, self.profile, broadcast_s=self._broadcast_s
            )
        elif self.profile is not None:
            excess_s = self._measurements.excess_s(result, self.profile)
        return _Trial(plan, rate, forecasts, excess_s)

    def _try_best(
        self, first: Forecasts, profile: Profile, network: Network, known: Sequence[Measured]
    ) -> Generator[Stage, StageResult, list[_Trial | None]]:
        """Try the plan that is expected to be the best, and another if that teaches something."""
        settings, baseline, forecasts = self._settings, self.baseline, first
        assert baseline is not None
        trials: list[_Trial | None] = []
        measured = list(known)
        tried: set[str] = set()
        while forecasts.plan is not None and len(trials) < TRIALS:
            trial = yield from self._try(forecasts.plan, forecasts)
            trials.append(trial)
            if trial is None or settings.planner != Auto.NAME or settings.compression is not None:
                break
            tried.add(trial.plan.planner)
            measured.append(trial.measured())
            forecasts = self._forecast(profile, network, measured)
            best_s = min(m.iteration_s for m in measured)
            name = forecasts.comparison.chosen
            least_gain_s = CONFIDENCE * baseline.noise_s
            if name in tried or forecasts.predicted_s(name) > best_s - least_gain_s:
                break
        return trials

    def _to_explore_reducer(self, first: Forecasts, network: Network, stock: Plan) -> list[Plan]:
        """Return the plan under which DDP's reducer is to be measured before one is tried, if any.

        Stock DDP's messages do not tell what each of many takes from computing.
        """
        plan, many = first.plan, MANY * len(stock.messages)
        if plan is None or needs_engine(plan):
            return []
        parts = max(EXPLORED_PARTS[-1], many + len(stock.messages))
        explored = in_equal_parts(first.profile, network, parts, by_need=False)
        return [explored] if min(len(p.messages) for p in (plan, explored)) > many else []

    def _to_explore_engine(self, first: Forecasts, network: Network, _: Plan) -> list[Plan]:
        """Return the plans under which the engine is to be measured before one is tried, if any.

        Nothing that is measured before tells what it takes from computing, as stock DDP's messages
        are another library's. They may overlap so little that they do not tell what overlapping
        costs. So the engine is also measured where it would gain much if that cost nothing.
        """
        plan = first.plan
        # Unless updates can wait, no plan of the engine can run.
        if not self._flushes.defers:
            return []
        if plan is None or plan.wait != "need":
            free = self._forecast(first.profile, network, [])
            stock_s = free.predicted_s(Ddp.NAME)
            gain_s = stock_s - free.predicted_s(free.comparison.chosen)
            plan = free.plan if gain_s >= EXPLORED_GAIN * stock_s else None
        if plan is None or plan.wait != "need":
            return []
        return [in_equal_parts(first.profile, network, parts) for parts in EXPLORED_PARTS]

    def _explore(self, plans: Sequence[Plan]) -> Generator[Stage, StageResult, list[Measured]]:
        """Train under simple plans, not those that are predicted; return nothing if one fails."""
        found: list[Measured] = []
        for plan in plans:
            trial = yield from self._try(plan, None)
            if trial is None:
                return []
            found.append(trial.measured())
        return found

    def _learns_of_reads(self, result: StageResult) -> bool:
        """Return whether gradients were found to be read in a way that ends the trial."""
        return self._learns_norm(result) or self._flushes.gives_up(result)

    def _learns_norm(self, result: StageResult) -> bool:
        """Note that every update waits for a norm of the gradients; return whether that is new."""
        fixed = self._settings.plan is not None or self._settings.compression is not None
        if fixed or self._norm is not None or not self._flushes.watches:
            return False
        asked: list[Norm] = [norm for norm in self._measurements.gather(result.norm) if norm]
        if not asked:
            return False
        self._norm = asked[0]
        self._say(
            f"every step needs the {self._norm}-norm of all gradients, as clipping does; planning "
            "for that"
        )
        return True

    def _mismatch(self, plan: Plan, result: StageResult) -> bool:
        for found in self._measurements.gather(result.mismatch):
            if found is not None:
                self._say(
                    f"DDP would not take the messages of {plan.planner}: {found}; {OTHER_ORDER}",
                    logging.WARNING,
                )
                return True
        return False

    def _judge(self, tried: list[_Trial | None], forecasts: Forecasts | None) -> Stages:
        """Keep the best plan that was tried, unless DDP's own buckets are faster."""
        trials = [trial for trial in tried if trial is not None]
        if not trials:
            reason = "DDP would not take the plan's messages"
            if forecasts is not None and not tried:
                reason = forecasts.comparison.reason
            self._conclude("ddp", reason, forecasts=forecasts)
            return
        best = min(trials, key=lambda trial: trial.rate.iteration_s)
        assert self.baseline is not None
        gain_s = self.baseline.iteration_s - best.rate.iteration_s
        if self._settings.check and gain_s <= self._noise_s(best):
            yield from self._judge_again(best)
        else:
            self._keep_or_drop(best)

    def _judge_again(self, trial: _Trial) -> Stages:
        """Measure stock DDP and then the plan once more; twice, if the first time changes the view.

        The machine itself may have become slower since stock DDP was measured, or may be slow for a
        moment. Between two measurements of the plan, a steady drift cancels.
        """
        assert self.baseline is not None
        judged, faster = trial, [trial.rate.iteration_s <= self.baseline.iteration_s]
        while faster.count(faster[-1]) < 2:
            stage = Stage(
                name="checking again", plan=None, warmup=REBUILT, iterations=self._compared
            )
            result = yield stage
            result = yield from self._go_on(stage, result)
            self.baseline = self._measurements.rate("stock DDP", result)
            deferred = self._flushes.defers
            again = yield from self._try(trial.plan, trial.forecasts, "trying again")
            if self._flushes.defers != deferred:
                yield from self._decide()
                return
            if again is None:
                break
            judged = trial._replace(rate=_mean(trial.rate, again.rate))
            faster.append(judged.rate.iteration_s <= self.baseline.iteration_s)
            trial = again
        self._keep_or_drop(judged)

    def _keep_or_drop(self, trial: _Trial) -> None:
        """Conclude on what was measured last."""
        assert self.baseline is not None
        figures = (
            f"{trial.plan.planner} took {trial.rate.iteration_s * 1e3:.2f} ms an iteration, stock "
            f"DDP {self.baseline.iteration_s * 1e3:.2f} ms (noise {self._noise_s(trial) * 1e3:.2f} "
            "ms)"
        )
        if self._settings.check and trial.rate.iteration_s > self.baseline.iteration_s:
            reason = f"{figures}; back to DDP's own buckets"
            if trial.plan.is_lossy:
                reason += ", dense; what is left of the gradients goes out with the next ones"
            self._conclude("reverted", reason, trial=trial, forecasts=trial.forecasts)
        else:
            if trial.plan.wait == "need":
                figures += "; each update is left to the next forward pass"
            self._conclude(
                "planned", figures, plan=trial.plan, trial=trial, forecasts=trial.forecasts
            )

    def _noise_s(self, trial: _Trial) -> float:
        assert self.baseline is not None
        return CONFIDENCE * math.hypot(trial.rate.noise_s, self.baseline.noise_s)

    def _conclude(
        self,
        decision: Decision,
        reason: str,
        *,
        plan: Plan | None = None,
        trial: _Trial | None = None,
        forecasts: Forecasts | None = None,
    ) -> None:
        """Take a decision, and keep what was expected before it beside it."""
        self.decision, self.reason, self.plan = decision, reason, plan
        self._forecasts = forecasts
        self.planned = trial.rate if trial else None
        self.predicted_planned_s = self.predicted_baseline_s = None
        self.predicted_timeline = self.measured_timeline = self.comparison = None
        if forecasts is not None:
            running = plan or self._settings.ddp.plan(forecasts.profile, forecasts.network)
            self.network = forecasts.network
            self.comparison = msgspec.structs.replace(
                forecasts.comparison, chosen=running.planner, reason=reason
            )
            self.predicted_timeline = forecasts.timeline(running)
            self.predicted_baseline_s = forecasts.predicted_s(Ddp.NAME)
            if trial is not None:
                self.predicted_planned_s = forecasts.predicted_s(trial.plan.planner)
        self._say(reason, logging.WARNING if decision == "reverted" else logging.INFO)

    def _record(self) -> Stages:
        """Record a few iterations under the final buckets for the measured timeline."""
        result = yield Stage(
            name="recording",
            plan=self.plan,
            warmup=_warmup(self.plan),
            iterations=RECORDED_ITERATIONS,
            observe=True,
            record=True,
        )
        if self.plan is not None and self._mismatch(self.plan, result):
            self._conclude("ddp", "DDP would not take the plan's messages")
            return
        if not self._settings.check:
            self._flushes.gives_up(result)  # a given plan was not tried before
        running = self.running_plan
        if running is None:
            return
        timelines = [
            timeline
            for iteration, recorded in result.recorded
            if (timeline := recorded_timeline(iteration, recorded, running, self._job.clock))
        ]
        if timelines:
            # The program may have done something else in one of them, such as to evaluate.
            rate = self.planned if self.plan is not None else self.baseline
            if rate is None:
                usual_ns = median(t.iteration_ns for t in timelines)
            else:
                usual_ns = rate.iteration_s * NS_PER_S
            self.measured_timeline = min(timelines, key=lambda t: abs(t.iteration_ns - usual_ns))

    def _say(self, text: str, level: int = logging.INFO) -> None:
        self.events.append(Event(iteration=self.iteration, text=text))
        if self._measurements.rank == 0:
            logger.log(level, "iteration %d: %s", self.iteration, text)


def _warmup(plan: Plan | None) -> int:
    """Return how many iterations pass under a plan until one is like all that follow."""
    return DEFERRED if plan is not None and plan.wait == "need" else REBUILT


def _mean(one: Rate, other: Rate) -> Rate:
    """Return the mean of two measurements of the same."""
    return Rate(
        name=one.name,
        iteration_s=(one.iteration_s + other.iteration_s) / 2,
        noise_s=math.hypot(one.noise_s, other.noise_s) / 2,
        iterations=one.iterations + other.iterations,
    )
