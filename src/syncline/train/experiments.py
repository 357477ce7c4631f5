"""Generators of steps that measure the DDP baseline, the job and plans until noise is low. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from msgspec.structs import replace

from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.auto import CONFIDENCE
from syncline.plan.planners.compressed import compressed
from syncline.plan.prediction import Comparison
from syncline.plan.profile import COMPUTING, Profile
from syncline.plan.recipe import Rounded, hook_for
from syncline.plan.run import Rate
from syncline.plan.simulator.contention import Measured
from syncline.train.engine.layout import needs_engine
from syncline.train.measure.statistics import compare, uninterrupted
from syncline.train.reads import Reads
from syncline.train.stages import Measurement, Notebook, Probe, Settings, Stage, Step

REBUILT = 2
"""Warm-up iterations after a change of buckets: DDP makes the final ones after the first."""
DEFERRED = REBUILT + 1
"""The same if updates are deferred: an iteration must also begin with a deferred update."""
STARTING_S = 1.0
MOST_STARTING = 16
"""A program's first STARTING_S are slow, so they are warm-up: at most MOST_STARTING iterations."""
LEAST_COMPARED = 3
COMPARED_S = 1.0
COMPARED_NOISE = 0.01
LONGEST_COMPARED_S = 15.0
MOST_COMPARED = (12, 48)
"""A comparison first evaluates the iterations of COMPARED_S, then adds half as many each time,
until their error is COMPARED_NOISE and the difference is significant. Its limit is
LONGEST_COMPARED_S, but at least 12 and at most 48 iterations."""
DETAILED_FROM_S = 0.5
"""Recording every operation takes some ms. From this length on, all profiled iterations do so.
Shorter ones take turns, and some record nothing, which shows the cost of recording."""
PROFILED = (2, 9)  # iterations observed at first, of long iterations and of short ones
MOST_PROFILED = (6, 18)
PROFILED_NOISE = 0.01
OTHER_ORDER = (
    "gradients become ready in another order than the plan's. Activation checkpointing may change "
    "it: profile the model as it trains, or leave plan and profile out; or pass "
    "find_unused_parameters=True, with which DDP keeps the plan's order"
)


class Forecasts(NamedTuple):
    """Predictions of all planners, and the plan to try next."""

    profile: Profile
    network: Network
    comparison: Comparison
    plan: Plan | None  # the plan to try; None if DDP's buckets are expected to be as good
    held_back: bool = False
    """Whether ``plan`` would leave messages to the next forward pass, but no optimizer defers."""
    compressing: Network | None = None  # the costs of compressed messages; None without compression

    def predicted_s(self, planner: str) -> float:
        """Return the predicted seconds an iteration of a planner."""
        return self.comparison.of(planner).iteration_s


class Trial(NamedTuple):
    """A plan that training ran under."""

    plan: Plan
    found: Measurement
    rate: Rate
    forecasts: Forecasts | None
    """The predictions from before the plan was tried; None if the plan was given."""
    slowdown_s: float | None = None
    """How much longer a worker computed than in the profile, seconds; None: not measured."""

    def measured(self) -> Measured:
        """Return the measurement that contention is fitted to."""
        noise_s = CONFIDENCE * self.rate.noise_s
        return Measured(self.plan, self.rate.iteration_s, noise_s, self.slowdown_s)


Steps = Generator[Step, Measurement, None]
Found = Generator[Step, Measurement, Measurement]
Tried = Generator[Step, Measurement, Trial | None]


class Experiments:
    """Runs measurements, each for as long as needed."""

    def __init__(self, settings: Settings, single: Plan, reads: Reads, notes: Notebook) -> None:
        self.settings = settings
        self.reads = reads
        self.notes = notes
        self._single = single  # the plan with one message, which needs no measurement
        self.baseline_s: tuple[float, ...] = ()  # seconds of the iterations of the DDP baseline
        self.hook: Rounded | None = None
        """The type of torch's hook in the DDP baseline, if 16 or 8 bits were asked for and it is
        faster than no hook."""
        self.broadcast_s = 0.0
        """Seconds that a broadcast of buffers takes while no plan's messages are in flight."""

    @property
    def baseline(self) -> Rate:
        """The DDP baseline, once it was measured."""
        assert self.notes.findings.baseline is not None
        return self.notes.findings.baseline

    def stage(self, name: str, plan: Plan | None, iterations: int = 0) -> Stage:
        """Return a stage under a plan; it warms up until iterations no longer change."""
        return Stage(
            name=name,
            plan=plan,
            hook=self.hook if plan is None else None,
            warmup=DEFERRED if plan is not None and plan.wait == "need" else REBUILT,
            iterations=iterations,
            watches_reads=self.reads.watches,
            plans_norm=self.reads.plans_norm,
        )

    def measure_until(
        self, stage: Stage, iteration_s: float, enough: Callable[[Measurement], bool]
    ) -> Found:
        """Train under a stage's messages until ``enough`` holds or the time limit is reached."""
        least = max(LEAST_COMPARED, math.ceil(COMPARED_S / iteration_s))
        most = min(max(round(LONGEST_COMPARED_S / iteration_s), MOST_COMPARED[0]), MOST_COMPARED[1])
        return (yield from self.measure(stage, min(least, most), most, enough))

    def measure(
        self, stage: Stage, count: int, most: int, enough: Callable[[Measurement], bool]
    ) -> Found:
        """Train for ``count`` iterations of a stage, then up to ``most`` until ``enough`` holds."""
        found = yield replace(stage, iterations=count)
        while count < most and not enough(found) and not self._is_over(stage, found):
            more = min(max(count // 2, 2), most - count)
            found = yield replace(stage, warmup=0, iterations=more, goes_on=True)
            count += more
        return found

    def _is_over(self, stage: Stage, found: Measurement) -> bool:
        """Whether a mismatch or early reads end a stage, whatever its iterations took."""
        return stage.plan is not None and (
            found.mismatch is not None or (self.reads.watches and found.read_early is not None)
        )

    def is_known(self, found: Measurement) -> bool:
        """Whether the error of an iteration's time is small."""
        rate = found.rate("")
        return rate.noise_s <= COMPARED_NOISE * rate.iteration_s

    def measure_baseline(
        self, name: str = "measuring DDP", iteration_s: float | None = None, *, anew: bool = True
    ) -> Found:
        """Train under DDP's buckets; ``iteration_s`` is an estimate of an iteration, if known.

        If 16 or 8 bits were asked for, the alternative to Syncline is DDP with torch's hook of 16
        bits. So ``anew`` also measures that, and the faster of the two is the baseline from then
        on; what ``anew`` returns is DDP without the hook.
        """
        self.hook = None if anew else self.hook
        warmup = REBUILT  # the buckets of a plan ran before
        if self.baseline_s:
            iteration_s = self.baseline_s[-1]
        if iteration_s is None:
            found = yield Stage(name=name, warmup=1, iterations=1)
            iteration_s = found.times_s[0]
            warmup = min(max(math.ceil(STARTING_S / iteration_s) - 2, 0), MOST_STARTING)
        stage = Stage(name=name, hook=self.hook, warmup=warmup)
        found = yield from self.measure_until(stage, iteration_s, self.is_known)
        self.reads.deferring = found.deferring
        self.broadcast_s = found.broadcast_s
        self._take_as_baseline(found)
        wire = self.settings.wire
        if anew and wire is not None:
            hook = hook_for(wire)
            stage = Stage(name=f"{name} with a {hook} hook", hook=hook, warmup=REBUILT)
            hooked = yield from self.measure_until(stage, found.times_s[-1], self.is_known)
            if hooked.rate("").iteration_s < self.baseline.iteration_s:
                self.hook = hook
                self._take_as_baseline(hooked)
        return found

    def _take_as_baseline(self, found: Measurement) -> None:
        name = "DDP" if self.hook is None else f"DDP with a {self.hook} hook"
        self.baseline_s = found.times_s
        self.notes.find(baseline=found.rate(name))

    def measure_job(
        self, iteration_s: float | None
    ) -> Generator[Step, Measurement, tuple[Profile, Network]]:
        """Probe the network, and profile the computation undisturbed by communication.

        ``iteration_s`` is that of the DDP baseline; None if nothing is checked. In that case,
        compression applies here too, and contention is guessed, as no iterations will show it.
        """
        settings, unchecked = self.settings, iteration_s is None
        # One message after the last gradient: nothing is in flight while operations run.
        plan = self._single
        if unchecked and settings.compression is not None:
            plan = compressed(plan, settings.compression)
        network, profile = settings.network, settings.profile
        warmup = 1
        if iteration_s is None and profile is not None and settings.compression is None:
            iteration_s = profile.phase_s(*COMPUTING)
        if iteration_s is None:
            found = yield Stage(name="profiling", plan=plan, warmup=REBUILT, iterations=1)
            iteration_s, warmup = found.times_s[0], 0
        if network is None:
            found = yield Probe(iteration_s=iteration_s, contention=unchecked)
            assert found.network is not None
            network = found.network
            self.notes.find(network=network)
        if profile is None:
            profile = yield from self._profile(plan, iteration_s, warmup)
        self.notes.find(profile=profile)
        return profile, network

    def _profile(
        self, plan: Plan, iteration_s: float, warmup: int
    ) -> Generator[Step, Measurement, Profile]:
        """Observe iterations until the error of the passes' sum is small."""
        is_short = iteration_s < DETAILED_FROM_S
        stage = Stage(
            name="profiling",
            plan=plan,
            warmup=warmup + is_short,
            iterations=PROFILED[is_short],
            turns=("quiet", "lean", "detailed") if is_short else ("detailed",),
        )
        found = yield stage
        count = stage.iterations
        while count < MOST_PROFILED[is_short] and not _is_precise(found.passes_s):
            more = min(max(count // 2, 1 + 2 * is_short), MOST_PROFILED[is_short] - count)
            found = yield replace(stage, warmup=0, iterations=more, goes_on=True)
            count += more
        assert found.profile is not None
        return replace(found.profile, norm=self.reads.norm, sharded=self.reads.deferring.sharded)

    def mismatches(self, plan: Plan, found: Measurement) -> bool:
        """Report if DDP's reducer did not take a plan's messages; return whether it did not."""
        if found.mismatch is None:
            return False
        self.notes.say(
            f"DDP did not take the messages of {plan.planner}: {found.mismatch}; {OTHER_ORDER}",
            logging.WARNING,
        )
        return True

    def try_plan(self, plan: Plan, forecasts: Forecasts | None, name: str = "trying") -> Tried:
        """Train under a plan; None if the reducer refuses it, or the program's reads prevent it."""
        stage = self.stage(f"{name} {plan.planner}", plan)

        def is_decided(found: Measurement) -> bool:
            return self.is_known(found) and compare(found.times_s, self.baseline_s) != 0

        found = yield from self.measure_until(stage, self.baseline.iteration_s, is_decided)
        return self.trial_of(plan, found, forecasts)

    def trial_of(self, plan: Plan, found: Measurement, forecasts: Forecasts | None) -> Trial | None:
        """Return a measurement under a plan as a trial; None in the cases of :meth:`try_plan`."""
        if self.mismatches(plan, found) or self.reads.learn(found):
            return None
        slowdown_s, profile = None, self.notes.findings.profile
        if profile is not None and needs_engine(plan):
            slowdown_s = found.active_slowdown_s(profile, broadcast_s=self.broadcast_s)
        elif profile is not None:
            slowdown_s = found.slowdown_s(profile)
        return Trial(plan, found, found.rate(plan.planner), forecasts, slowdown_s)


def _is_precise(values: Sequence[float]) -> bool:
    """Whether the standard error of a few values is small, leaving out interrupted ones."""
    values = uninterrupted(values)
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return error <= PROFILED_NOISE * fmean(values)


def in_ms(seconds: float) -> str:
    """Return a time as reports show it."""
    return f"{seconds * 1e3:.2f} ms"
