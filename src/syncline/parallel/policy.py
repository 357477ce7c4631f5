"""``Policy``: which step of measuring comes next, and what to conclude from what it shows. Pure.

Here is no torch, no collective, no log and no clock: a generator yields a :class:`Stage` to train
under, or a :class:`Probe` of the network, and is sent what all ranks measured in it. It runs on
rank 0 alone (:mod:`.tuning` shares its steps), so its state need not be sent: it is the local
variables of the strategy that decides. There is a strategy for a plan that was given, for one that
is not checked, for one that was remembered, and for measuring, planning and trying.

Every comparison is sequential: more iterations are measured until the difference is significant
(:func:`syncline.measure.statistics.compare`), up to a limit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import msgspec

from syncline.measure.statistics import compare
from syncline.model.network import Contention, Network
from syncline.model.plan import Plan
from syncline.model.profile import COMPUTING, Baseline, Profile
from syncline.model.run import Decision, Rate
from syncline.parallel.engine.layout import needs_engine
from syncline.parallel.forecasts import Forecasts, forecast
from syncline.parallel.reads import Reads
from syncline.parallel.stages import Deferring, Findings, Measurement, Probe, Settings, Stage, Step
from syncline.planners.auto import CONFIDENCE, Auto
from syncline.planners.compressed import compressed
from syncline.planners.ddp import Ddp
from syncline.planners.halves import in_equal_parts
from syncline.simulator.contention import MANY, Measured, as_under_stock

Steps = Generator[Step, Measurement, None]

REBUILT = 2
"""Iterations after a change of buckets: DDP makes the final ones after the first."""
DEFERRED = REBUILT + 1
"""The same where updates are deferred: until one begins with an update that is due."""
STARTING_S = 1.0
MOST_STARTING = 16
"""A program's first second is slower than the rest; so many iterations are waited for at most."""
LEAST_COMPARED = 3
COMPARED_S = 1.0
COMPARED_NOISE = 0.01
LONGEST_COMPARED_S = 15.0
MOST_COMPARED = (12, 48)
"""A comparison looks at the iterations of COMPARED_S first, then at half as many more each time,
until their error is COMPARED_NOISE and the difference is significant. It ends at the latest after
LONGEST_COMPARED_S, but not before 12 iterations and not after 48."""
DETAILED_FROM_S = 0.5
"""Noting every operation takes some ms. Longer iterations are all observed so; of others some are,
and some are not observed at all, to take off what observing costs."""
PROFILED = (2, 9)
"""Iterations observed at first, of long iterations and of short ones."""
MOST_PROFILED = (6, 18)
PROFILED_NOISE = 0.01
RECORDED_ITERATIONS = 3
CALIBRATION_PARTS = (4, 12)
"""Messages, as reduce-scatter and all-gather if there is a norm, under which the engine is
measured: few and many show what each takes from computing. DDP's reducer is measured under the many
only, or under more if the DDP baseline has as many."""
LEAST_CALIBRATED = 3
MOST_CALIBRATED = 12
CALIBRATED_S = 0.5
"""Calibrating looks at the iterations of CALIBRATED_S, at least LEAST_CALIBRATED, and at up to
MOST_CALIBRATED until their error is COMPARED_NOISE: of two, one that is interrupted counts half."""
CONTENDED = 1.02
"""Where stock DDP shows less contention the engine is not calibrated before a plan is tried."""
AS_PREDICTED = 0.03
"""A trial whose plan takes as long as predicted within this teaches nothing."""
CALIBRATION_GAIN = 0.05
"""Share of an iteration that overlapping must gain, if it cost nothing, to be calibrated then."""
LEAST_GAIN = 0.01
"""A plan that is predicted to gain this share is tried, however uneven the DDP baseline is: a trial
costs next to nothing where the plan is as fast."""
TRIALS = 3
"""At most this many plans are tried: another when the one before has taught something."""
AS_REMEMBERED = 0.05
"""Where a remembered plan runs within this of what it took then, what was measured then holds."""
CHANGED = 0.20
"""Where it differs by more, nothing that was measured then holds."""
OTHER_ORDER = (
    "gradients become ready in another order than the plan's. Activation checkpointing may change "
    "it: profile the model as it trains, or leave plan and profile out; or pass "
    "find_unused_parameters=True, with which DDP keeps the plan's order"
)


class Trial(NamedTuple):
    """A plan that training ran under."""

    plan: Plan
    found: Measurement
    rate: Rate
    forecasts: Forecasts | None
    """What was expected before the plan was tried; None where the plan was given."""
    slowdown_s: float | None = None
    """How much longer a worker computed than in the profile, seconds; None: not measured."""

    def measured(self) -> Measured:
        """Return what it tells of contention."""
        noise_s = CONFIDENCE * self.rate.noise_s
        return Measured(self.plan, self.rate.iteration_s, noise_s, self.slowdown_s)


class News(NamedTuple):
    """Something to report."""

    text: str
    level: int
    is_for_users: bool = False
    """Whether users are to see it who have not configured logging."""


class _Known(NamedTuple):
    """What all plans of a training are made and judged by."""

    profile: Profile
    network: Network
    own: Measured | None
    """Iterations under DDP's own buckets; None where nothing is checked."""


Found = Generator[Step, Measurement, Measurement]
Tried = Generator[Step, Measurement, Trial | None]


class Policy:
    """The decisions of one training.

    Args:
        settings: what the user asked for.
        single: the plan with one message, which needs no measurement.
        deferring: whether updates can wait, before the first iteration.
        remembered: what an earlier start of the same training has found.
        resumed: a tuple of the plan that a checkpoint says is to run.
    """

    def __init__(
        self,
        settings: Settings,
        single: Plan,
        deferring: Deferring,
        *,
        remembered: Findings | None = None,
        resumed: tuple[Plan | None] | None = None,
    ) -> None:
        self._settings = settings
        self._single = single
        self._remembered = remembered
        self._resumed = resumed
        self._known: _Known | None = None
        self._broadcast_s = 0.0
        """What a broadcast of buffers takes where nothing else is under way."""
        self._forecasts: Forecasts | None = None
        """What was expected of the plan that runs, before it was tried."""
        self._baseline: tuple[float, ...] = ()
        """Seconds of the iterations of the DDP baseline."""
        self.findings = Findings(profile=settings.profile, network=settings.network)
        self.news: list[News] = []
        """What is to be reported; whoever reports it empties the list."""
        self._reads = Reads(
            deferring,
            self._say,
            norm=None if settings.profile is None else settings.profile.norm,
            plans_norm=settings.plan is None and settings.compression is None,
            heed=settings.check,
        )

    # ------------------------------------------------------------------ the way through training

    def steps(self) -> Steps:
        """Measure, plan, try, decide, record, and train on; once more after a change."""
        yield from self._strategy()
        while True:
            yield from self._record()
            while True:
                found = yield self._steady()
                if self._reads.learn(found):
                    yield from self._plan_again()
                    break
                if found.drifted:
                    self._say(
                        "computation or communication has drifted; measuring and planning again"
                    )
                    yield from self._strategy()
                    break
                plan = self.findings.plan
                if found.slower and plan is not None:
                    self._say(
                        f"{plan.planner} takes longer than stock DDP did; measuring both again"
                    )
                    trial = Trial(plan, found, found.rate(plan.planner), self._forecasts)
                    yield from self._judge_again(trial)
                    break

    def _strategy(self) -> Steps:
        settings = self._settings
        if self._resumed is not None:
            return self._go_on_as_resumed()
        if settings.plan is not None:
            return self._check_given() if settings.check else self._run_given()
        if not settings.check:
            return self._run_unchecked()
        if self._remembered is not None:
            return self._check_remembered()
        return self._measure_and_plan()

    def _stage(self, name: str, plan: Plan | None, iterations: int = 0) -> Stage:
        """Return a stage under a plan, which warms up until an iteration is like all that follow.

        Where updates are deferred, that is the first that begins with an update that is due.
        """
        return Stage(
            name=name,
            plan=plan,
            warmup=DEFERRED if plan is not None and plan.wait == "need" else REBUILT,
            iterations=iterations,
            watches_reads=self._reads.watches,
        )

    def _steady(self) -> Stage:
        plan = self.findings.plan
        reverts = self._settings.check and plan is not None
        stage = self._stage("steady", plan)
        return msgspec.structs.replace(stage, baseline=self.findings.baseline if reverts else None)

    def _record(self) -> Steps:
        """Record a few iterations under the final messages for the measured timeline."""
        plan = self.findings.plan
        stage = self._stage("recording", plan, RECORDED_ITERATIONS)
        found = yield msgspec.structs.replace(stage, turns=("detailed",), record=True)
        if plan is not None and self._mismatches(plan, found):
            self._conclude("ddp", "DDP would not take the plan's messages")
        elif not self._settings.check and self._reads.learn(found):
            yield from self._plan_again()  # nothing was tried before

    # ------------------------------------------------------------------ strategies

    def _go_on_as_resumed(self) -> Steps:
        assert self._resumed is not None
        (plan,), self._resumed = self._resumed, None
        if plan is None:
            self._conclude("reverted", "the checkpoint was written after dense buckets had won")
        else:
            plan = self._reads.as_it_can_run(plan)
            self._conclude("planned", "the checkpoint's plan goes on, unchecked", plan=plan)
        yield from ()

    def _run_given(self) -> Steps:
        assert self._settings.plan is not None
        plan = self._reads.as_it_can_run(self._settings.plan)
        self._conclude("planned", "the plan was given, unchecked", plan=plan)
        yield from ()

    def _check_given(self) -> Steps:
        given = self._settings.plan
        assert given is not None
        yield from self._measure_baseline()
        trial, deferred = None, None
        while trial is None and deferred != self._reads.defers:
            deferred = self._reads.defers
            trial = yield from self._try(self._reads.as_it_can_run(given), None)
        yield from self._judge([trial], None)

    def _run_unchecked(self) -> Steps:
        """Run the planner's plan as soon as there is a profile; compressed from the first step."""
        profile, network = yield from self._measure_job(None)
        self._known = _Known(profile, network, None)
        self._plan_unchecked(self._known)

    def _plan_unchecked(self, known: _Known) -> None:
        expected = self._forecast(known.profile, known.network, [])
        self._report_held_back(expected)
        self._conclude(
            "planned" if expected.plan is not None else "ddp",
            expected.comparison.reason,
            plan=expected.plan,
            forecasts=expected,
        )

    def _check_remembered(self) -> Steps:
        """Run what an earlier start has decided; measure anew if it is not what it was then."""
        then, self._remembered = self._remembered, None
        assert then is not None
        expected = then.baseline if then.plan is None else then.planned
        assert then.baseline is not None
        assert expected is not None
        plan = None if then.plan is None else self._reads.as_it_can_run(then.plan)
        self._announce(f"running what an earlier start has found: {expected.name}")
        stage = self._stage("running what is remembered", plan)
        found = yield from self._measure_until(stage, expected.iteration_s, self._is_known)
        known = plan == then.plan and not (
            (plan is not None and self._mismatches(plan, found)) or self._reads.learn(found)
        )
        rate = found.rate(expected.name)
        change = abs(rate.iteration_s / expected.iteration_s - 1)
        noise = CONFIDENCE * math.hypot(rate.noise_s, expected.noise_s) / expected.iteration_s
        figures = (
            f"{expected.name} takes {_ms(rate.iteration_s)} an iteration, remembered were "
            f"{_ms(expected.iteration_s)}"
        )
        if known and change <= max(AS_REMEMBERED, noise):
            gain = "" if plan is None else f", {_ms(then.baseline.iteration_s)} under stock DDP"
            self.findings = msgspec.structs.replace(then, reason=f"{figures}{gain}")
            self._say(self.findings.reason)
            return
        if known and plan is not None and change <= CHANGED:
            self._say(f"{figures}; comparing it with DDP again")
            self.findings = msgspec.structs.replace(then, plan=None)
            yield from self._measure_baseline("comparing with DDP", rate.iteration_s)
            if compare(found.times_s, self._baseline) > 0:
                self._keep_or_drop(Trial(plan, found, rate, None), then)
                return
        if known:
            self._say(f"{figures}; measuring and planning again")
        self.findings = Findings(network=self._settings.network)
        yield from self._measure_and_plan()

    def _measure_and_plan(self) -> Steps:
        if self._known is None:
            self._announce(
                "measuring the first iterations and the network, to plan the exchange of "
                "gradients; training goes on meanwhile"
            )
        found = yield from self._measure_baseline()
        assert self.findings.baseline is not None
        profile, network = yield from self._measure_job(self.findings.baseline.iteration_s)
        if profile.baseline is None:
            rate = self.findings.baseline
            stock = Baseline(
                iteration_s=rate.iteration_s, noise_s=rate.noise_s, iterations=rate.iterations
            )
            profile = msgspec.structs.replace(profile, baseline=stock)
        plan = self._settings.ddp.plan(profile, network)
        rate, slowdown_s = self.findings.baseline, found.slowdown_s(profile)
        own = Trial(plan, found, rate, None, slowdown_s).measured()
        under = as_under_stock(own, profile, network)
        self._known = _Known(*under)
        self._find(profile=under.profile, network=under.network)
        yield from self._plan_and_try()

    def _plan_again(self) -> Steps:
        """Plan by what is known of the program's reads now, without measuring again."""
        if self._known is None:
            yield from self._strategy()
        elif self._known.own is None:
            self._with_norm()
            self._plan_unchecked(self._known)
        else:
            yield from self._plan_and_try()

    def _plan_and_try(self) -> Steps:
        """Try the best plans, and keep one of them or DDP's own buckets."""
        while True:
            reads, known = self._reads.state, self._with_norm()
            assert known.own is not None
            measured, trials = [known.own], []
            first = self._forecast(known.profile, known.network, measured)
            self._report_held_back(first)
            if self._settings.compression is None:
                first, measured = yield from self._calibrate(first, known, measured)
            if self._reads.state == reads:
                trials = yield from self._try_best(first, known, measured)
            if self._reads.state == reads:
                break
            # Nothing of what was expected and tried can run any more: once more from here.
        yield from self._judge(trials, first)

    def _with_norm(self) -> _Known:
        """Take the norm that the program asks for into the profile."""
        assert self._known is not None
        profile = msgspec.structs.replace(self._known.profile, norm=self._reads.norm)
        self._known = self._known._replace(profile=profile)
        self._find(profile=profile)
        return self._known

    # ------------------------------------------------------------------ measuring

    def _measure_until(
        self, stage: Stage, iteration_s: float, enough: Callable[[Measurement], bool]
    ) -> Found:
        """Train under a stage's messages until what was measured is enough, or for long enough."""
        least = max(LEAST_COMPARED, math.ceil(COMPARED_S / iteration_s))
        most = min(max(round(LONGEST_COMPARED_S / iteration_s), MOST_COMPARED[0]), MOST_COMPARED[1])
        return (yield from self._measure(stage, min(least, most), most, enough))

    def _measure(
        self, stage: Stage, count: int, most: int, enough: Callable[[Measurement], bool]
    ) -> Found:
        found = yield msgspec.structs.replace(stage, iterations=count)
        while count < most and not enough(found) and not self._is_over(stage, found):
            more = min(max(count // 2, 2), most - count)
            found = yield msgspec.structs.replace(stage, warmup=0, iterations=more, goes_on=True)
            count += more
        return found

    def _is_over(self, stage: Stage, found: Measurement) -> bool:
        """Whether what a stage has shown ends it, whatever its iterations took."""
        return stage.plan is not None and (
            found.mismatch is not None or (self._reads.watches and found.read_early is not None)
        )

    def _is_known(self, found: Measurement) -> bool:
        rate = found.rate("")
        return rate.noise_s <= COMPARED_NOISE * rate.iteration_s

    def _measure_baseline(
        self, name: str = "measuring DDP", iteration_s: float | None = None
    ) -> Found:
        """Train under DDP's own buckets; ``iteration_s``, if known, is what one may take."""
        warmup = REBUILT  # the buckets of a plan ran before
        if self._baseline:
            iteration_s = self._baseline[-1]
        if iteration_s is None:
            found = yield Stage(name=name, warmup=1, iterations=1)
            iteration_s = found.times_s[0]
            warmup = min(max(math.ceil(STARTING_S / iteration_s) - 2, 0), MOST_STARTING)
        stage = Stage(name=name, warmup=warmup)
        found = yield from self._measure_until(stage, iteration_s, self._is_known)
        self._reads.deferring = found.deferring
        self._baseline = found.times_s
        self._broadcast_s = found.broadcast_s
        self._find(baseline=found.rate("stock DDP"))
        return found

    def _measure_job(
        self, iteration_s: float | None
    ) -> Generator[Step, Measurement, tuple[Profile, Network]]:
        """Probe the network, and profile the computation undisturbed by communication.

        ``iteration_s`` is that of the DDP baseline; None where there is none. Then compressed steps
        are compressed here too, and no iterations will tell contention.
        """
        settings, unchecked = self._settings, iteration_s is None
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
            self._find(network=network)
        if profile is None:
            profile = yield from self._profile(plan, iteration_s, warmup)
        self._find(profile=profile)
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
        while count < MOST_PROFILED[is_short] and not _is_even(found.passes_s):
            more = min(max(count // 2, 1 + 2 * is_short), MOST_PROFILED[is_short] - count)
            found = yield msgspec.structs.replace(stage, warmup=0, iterations=more, goes_on=True)
            count += more
        assert found.profile is not None
        return msgspec.structs.replace(found.profile, norm=self._reads.norm)

    # ------------------------------------------------------------------ planning and trying

    def _forecast(
        self, profile: Profile, network: Network, measured: Sequence[Measured]
    ) -> Forecasts:
        stock = profile.baseline
        if stock is not None and self._settings.check:
            noise_s = min(stock.noise_s, LEAST_GAIN * stock.iteration_s / CONFIDENCE)
            stock = msgspec.structs.replace(stock, noise_s=noise_s)
            profile = msgspec.structs.replace(profile, baseline=stock)
        return forecast(profile, network, self._settings, measured, defers=self._reads.defers)

    def _report_held_back(self, expected: Forecasts) -> None:
        if expected.held_back:
            self._reads.report_held_back(self._settings.planner)

    def _try(self, plan: Plan, forecasts: Forecasts | None, name: str = "trying") -> Tried:
        """Train under a plan; None if the reducer refuses it, or if no such plan can run."""
        stage = self._stage(f"{name} {plan.planner}", plan)
        assert self.findings.baseline is not None

        def is_decided(found: Measurement) -> bool:
            return self._is_known(found) and compare(found.times_s, self._baseline) != 0

        found = yield from self._measure_until(
            stage, self.findings.baseline.iteration_s, is_decided
        )
        return self._trial(plan, found, forecasts)

    def _trial(self, plan: Plan, found: Measurement, forecasts: Forecasts | None) -> Trial | None:
        if self._mismatches(plan, found) or self._reads.learn(found):
            return None
        slowdown_s, profile = None, self.findings.profile
        if profile is not None and needs_engine(plan):
            slowdown_s = found.active_slowdown_s(profile, broadcast_s=self._broadcast_s)
        elif profile is not None:
            slowdown_s = found.slowdown_s(profile)
        return Trial(plan, found, found.rate(plan.planner), forecasts, slowdown_s)

    def _try_best(
        self, first: Forecasts, known: _Known, measured: Sequence[Measured]
    ) -> Generator[Step, Measurement, list[Trial | None]]:
        """Try the plan that is expected to be the best, and another if that teaches something."""
        settings, baseline, expected = self._settings, self.findings.baseline, first
        assert baseline is not None
        trials: list[Trial | None] = []
        measured = list(measured)
        tried: list[Plan] = []
        while expected.plan is not None and len(trials) < TRIALS:
            predicted_s = expected.predicted_s(expected.plan.planner)
            self._announce(
                f"trying {expected.plan.planner}, which is predicted to take {_ms(predicted_s)} an "
                f"iteration; stock DDP takes {_ms(baseline.iteration_s)}"
            )
            trial = yield from self._try(expected.plan, expected)
            trials.append(trial)
            if trial is None or settings.compression is not None:
                break
            if settings.planner != Auto.NAME or self._is_as_predicted(trial):
                break
            measured.append(trial.measured())
            tried.append(trial.plan)
            expected = self._forecast(known.profile, known.network, measured)
            best_s = min(m.iteration_s for m in measured)
            name = expected.comparison.chosen
            least_gain_s = min(CONFIDENCE * baseline.noise_s, LEAST_GAIN * baseline.iteration_s)
            if expected.plan in tried or expected.predicted_s(name) > best_s - least_gain_s:
                break
        return trials

    def _is_as_predicted(self, trial: Trial) -> bool:
        """Whether a trial teaches nothing: the plan takes as long as the model says."""
        assert trial.forecasts is not None
        predicted_s = trial.forecasts.predicted_s(trial.plan.planner)
        error_s = abs(trial.rate.iteration_s - predicted_s)
        noise_s = CONFIDENCE * trial.rate.noise_s
        return error_s <= max(AS_PREDICTED * trial.rate.iteration_s, noise_s)

    def _calibrate(
        self, first: Forecasts, known: _Known, measured: list[Measured]
    ) -> Generator[Step, Measurement, tuple[Forecasts, list[Measured]]]:
        """Measure the reducer or the engine under simple plans, where that tells what a plan takes.

        What is learnt of the engine may bring up a plan of the reducer.
        """
        assert known.own is not None
        stock = known.own.plan
        reads = self._reads.state
        ran: list[list[Plan]] = [[]]
        for parts_for in (self._reducer_parts, self._parts_by_need, self._reducer_parts):
            plans = parts_for(first, stock)
            if plans in ran or reads != self._reads.state:
                continue
            ran.append(plans)
            more = yield from self._run_parts(plans)
            measured = [*measured, *(more or [])]
            first = self._forecast(known.profile, known.network, measured)
        return first, measured

    def _reducer_parts(self, first: Forecasts, stock: Plan) -> list[Plan]:
        """Return the plan under which DDP's reducer is to be measured before one is tried, if any.

        Stock DDP's messages do not tell what each of many takes from computing.
        """
        plan, many = first.plan, MANY * len(stock.messages)
        if plan is None or needs_engine(plan):
            return []
        parts = max(CALIBRATION_PARTS[-1], many + len(stock.messages))
        found = in_equal_parts(first.profile, first.network, parts, by_need=False)
        return [found] if min(len(p.messages) for p in (plan, found)) > many else []

    def _parts_by_need(self, first: Forecasts, _: Plan) -> list[Plan]:
        """Return the plans under which the engine is to be measured before one is tried, if any.

        Nothing that is measured before tells what it takes from computing, as stock DDP's messages
        are another library's. Where those show no contention, hosts have cores of their own for it.
        They may also overlap so little that they do not tell what overlapping costs. So the engine
        is measured where it would gain much if that cost nothing, too.
        """
        plan = first.plan
        # Unless updates can wait, no plan of the engine can run.
        if not self._reads.defers:
            return []
        if plan is None or plan.wait != "need":
            free = self._forecast(first.profile, _without_contention(first.network), [])
            stock_s = free.predicted_s(Ddp.NAME)
            gain_s = stock_s - free.predicted_s(free.comparison.chosen)
            plan = free.plan if gain_s >= CALIBRATION_GAIN * stock_s else None
        elif max(first.network.contention.computing, first.network.contention.exchange) < CONTENDED:
            return []
        if plan is None or plan.wait != "need":
            return []
        return [in_equal_parts(first.profile, first.network, n) for n in CALIBRATION_PARTS]

    def _run_parts(
        self, plans: Sequence[Plan]
    ) -> Generator[Step, Measurement, list[Measured] | None]:
        """Train under simple plans, not those that are predicted; return None if one fails."""
        assert self.findings.baseline is not None
        found: list[Measured] = []
        iterations = math.ceil(CALIBRATED_S / self.findings.baseline.iteration_s)
        least = min(max(iterations, LEAST_CALIBRATED), MOST_COMPARED[1])
        for plan in plans:
            stage = self._stage(f"calibrating with {plan.planner}", plan)
            most = max(least, MOST_CALIBRATED)
            measured = yield from self._measure(stage, least, most, self._is_known)
            trial = self._trial(plan, measured, None)
            if trial is None:
                return None
            found.append(trial.measured())
        return found

    def _mismatches(self, plan: Plan, found: Measurement) -> bool:
        if found.mismatch is None:
            return False
        self._say(
            f"DDP would not take the messages of {plan.planner}: {found.mismatch}; {OTHER_ORDER}",
            logging.WARNING,
        )
        return True

    # ------------------------------------------------------------------ judging

    def _judge(self, tried: Sequence[Trial | None], forecasts: Forecasts | None) -> Steps:
        """Keep the best plan that was tried, unless DDP's own buckets are faster."""
        trials = [trial for trial in tried if trial is not None]
        if not trials:
            reason = "DDP would not take the plan's messages"
            if forecasts is not None and not tried:
                reason = forecasts.comparison.reason
            self._conclude("ddp", reason, forecasts=forecasts)
            return
        best = min(trials, key=lambda trial: trial.rate.iteration_s)
        assert self.findings.baseline is not None
        gain_s = self.findings.baseline.iteration_s - best.rate.iteration_s
        if gain_s <= self._noise_s(best):
            yield from self._judge_again(best)
        else:
            self._keep_or_drop(best)

    def _judge_again(self, trial: Trial) -> Steps:
        """Measure stock DDP and then the plan once more; twice, if the first time changes the view.

        The machine itself may have become slower since stock DDP was measured, or may be slow for a
        moment. Between two measurements of the plan, a steady drift cancels.
        """
        assert self.findings.baseline is not None
        judged, faster = trial, [trial.rate.iteration_s <= self.findings.baseline.iteration_s]
        while faster.count(faster[-1]) < 2:
            yield from self._measure_baseline("comparing with DDP")
            reads = self._reads.state
            again = yield from self._try(trial.plan, trial.forecasts, "comparing")
            if self._reads.state != reads:
                yield from self._plan_again()
                return
            if again is None:
                break
            judged = trial._replace(rate=_mean(trial.rate, again.rate))
            faster.append(judged.rate.iteration_s <= self.findings.baseline.iteration_s)
            trial = again
        self._keep_or_drop(judged)

    def _keep_or_drop(self, trial: Trial, then: Findings | None = None) -> None:
        """Conclude on what was measured last; ``then`` says what was expected earlier."""
        baseline = self.findings.baseline
        assert baseline is not None
        figures = (
            f"{trial.plan.planner} took {_ms(trial.rate.iteration_s)} an iteration, stock DDP "
            f"{_ms(baseline.iteration_s)} (noise {_ms(self._noise_s(trial))})"
        )
        if trial.rate.iteration_s > baseline.iteration_s:
            reason = f"{figures}; back to DDP's own buckets"
            if trial.plan.is_lossy:
                reason += ", dense; what is left of the gradients goes out with the next ones"
            self._conclude("reverted", reason, trial=trial, forecasts=trial.forecasts)
            return
        if trial.plan.wait == "need":
            figures += "; each update is left to the next forward pass"
        self._conclude(
            "planned", figures, plan=trial.plan, trial=trial, forecasts=trial.forecasts, then=then
        )

    def _noise_s(self, trial: Trial) -> float:
        assert self.findings.baseline is not None
        return CONFIDENCE * math.hypot(trial.rate.noise_s, self.findings.baseline.noise_s)

    def _conclude(
        self,
        decision: Decision,
        reason: str,
        *,
        plan: Plan | None = None,
        trial: Trial | None = None,
        forecasts: Forecasts | None = None,
        then: Findings | None = None,
    ) -> None:
        """Take a decision, and keep what was expected before it beside it."""
        self._forecasts = forecasts
        expected = Findings() if then is None else then
        network = self.findings.network
        if forecasts is not None:
            network = forecasts.network
            running = plan or self._settings.ddp.plan(forecasts.profile, network)
            chosen = trial.plan if trial is not None else plan
            expected = Findings(
                comparison=msgspec.structs.replace(
                    forecasts.comparison, chosen=running.planner, reason=reason
                ),
                costs=forecasts.compressing if running.is_lossy else None,
                predicted_baseline_s=forecasts.predicted_s(Ddp.NAME),
                predicted_planned_s=forecasts.predicted_s(chosen.planner) if chosen else None,
            )
        self.findings = msgspec.structs.replace(
            expected,
            profile=self.findings.profile,
            network=network,
            plan=plan,
            baseline=self.findings.baseline,
            planned=trial.rate if trial else None,
            decision=decision,
            reason=reason,
        )
        level = logging.WARNING if decision == "reverted" else logging.INFO
        self.news.append(
            News(reason, level, is_for_users=forecasts is not None or trial is not None)
        )

    # ------------------------------------------------------------------ what is told

    def _find(self, **found: object) -> None:
        self.findings = msgspec.structs.replace(self.findings, **found)

    def _say(self, text: str, level: int = logging.INFO) -> None:
        self.news.append(News(text, level))

    def _announce(self, text: str) -> None:
        self.news.append(News(text, logging.INFO, is_for_users=True))


def _is_even(values: Sequence[float]) -> bool:
    """Whether the standard error of a few values is small."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(squares / max(len(values) - 1, 1) / len(values))
    return len(values) > 1 and error <= PROFILED_NOISE * mean


def _without_contention(network: Network) -> Network:
    return msgspec.structs.replace(network, contention=Contention(), contention_by_need=None)


def _mean(one: Rate, other: Rate) -> Rate:
    """Return the mean of two measurements of the same."""
    return Rate(
        name=one.name,
        iteration_s=(one.iteration_s + other.iteration_s) / 2,
        noise_s=math.hypot(one.noise_s, other.noise_s) / 2,
        iterations=one.iterations + other.iterations,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
