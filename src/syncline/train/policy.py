"""``Policy``: chooses each step of measuring, and draws conclusions from its result. Pure.

This module uses no torch, no collective, no log and no clock. A generator yields a :class:`Stage`
to train under, or a :class:`Probe` of the network, and is sent what all ranks measured in it. It
runs on rank 0 alone (:mod:`.tuning` shares its steps), so its state need not be sent.

:mod:`.experiments` measures, and :mod:`.trials` chooses the plans to try. Every comparison is
sequential: more iterations are measured until the difference is significant
(:func:`syncline.train.measure.statistics.compare`), up to a limit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from msgspec.structs import replace

from syncline.plan.plan import Plan
from syncline.plan.planners.auto import CONFIDENCE, suggestion
from syncline.plan.planners.compressed import compressed
from syncline.plan.profile import Baseline
from syncline.plan.recipe import Recipe
from syncline.plan.run import Decision, Rate
from syncline.plan.simulator.contention import corrected_by_baseline
from syncline.train.experiments import Experiments, Forecasts, Steps, Trial, in_ms
from syncline.train.measure.statistics import compare
from syncline.train.reads import Reads
from syncline.train.stages import Deferring, Findings, Notebook, Settings, Stage
from syncline.train.trials import Known, Trials

RECORDED_ITERATIONS = 3
AS_REMEMBERED = 0.05
"""If a remembered plan's time differs from the saved one by at most this, the decision holds."""
CHANGED = 0.20  # if it differs by more than this, none of the saved measurements holds


class Policy:
    """The decisions of one training.

    ``single`` is the plan with one message, which needs no measurement; ``remembered`` is what an
    earlier start of the same training has found; ``resumed`` has the plan of a checkpoint.
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
        self.notes = Notebook(Findings(profile=settings.profile, network=settings.network))
        self._settings = settings
        self._remembered = remembered
        self._resumed = resumed
        self._known: Known | None = None
        self._forecasts: Forecasts | None = None
        """The predictions for the running plan, from before it was tried."""
        self._reads = Reads(settings, deferring, self.notes)
        self._experiments = Experiments(settings, single, self._reads, self.notes)
        self._trials = Trials(self._experiments)

    @property
    def findings(self) -> Findings:
        """What is known by now."""
        return self.notes.findings

    # ------------------------------------------------------------------ the way through training

    def steps(self) -> Steps:
        """Measure, plan, try, decide, record, and train on; start again after a change."""
        yield from self._strategy()
        while True:
            yield from self._record()
            while True:
                found = yield self._steady()
                if self._reads.learn(found):
                    yield from self._plan_again()
                    break
                if found.drifted:
                    self.notes.say(
                        "computation or communication has drifted; measuring and planning again"
                    )
                    yield from self._strategy()
                    break
                plan = self.findings.plan
                if found.slower and plan is not None:
                    self.notes.say(
                        f"{plan.planner} takes longer than DDP did; measuring both again"
                    )
                    trial = Trial(plan, found, found.rate(plan.planner), self._forecasts)
                    yield from self._judge_again(trial)
                    break

    def _strategy(self) -> Steps:
        settings = self._settings
        if self._resumed is not None:
            self._go_on_as_resumed(*self._resumed)
        elif settings.plan is not None and settings.check:
            yield from self._check_given(settings.plan)
        elif settings.plan is not None:
            plan = self._reads.as_it_can_run(settings.plan)
            self._conclude("planned", "the plan was given, unchecked", plan=plan)
        elif not settings.check:
            yield from self._run_unchecked()
        elif self._remembered is not None:
            yield from self._check_remembered(self._remembered)
        else:
            yield from self._measure_and_plan()

    def _steady(self) -> Stage:
        plan = self.findings.plan
        reverts = self._settings.check and plan is not None
        stage = self._experiments.stage("steady", plan)
        return replace(stage, baseline=self.findings.baseline if reverts else None)

    def _record(self) -> Steps:
        """Record a few iterations under the final messages for the measured timeline."""
        plan = self.findings.plan
        stage = self._experiments.stage("recording", plan, RECORDED_ITERATIONS)
        found = yield replace(stage, turns=("detailed",), record=True)
        if plan is not None and self._experiments.mismatches(plan, found):
            self._conclude("ddp", "DDP's reducer did not take the plan's messages as its buckets")
        elif not self._settings.check and self._reads.learn(found):
            yield from self._plan_again()  # nothing was tried before

    # ------------------------------------------------------------------ strategies

    def _go_on_as_resumed(self, plan: Plan | None) -> None:
        self._resumed = None
        if plan is None:
            self._conclude("reverted", "DDP's buckets had won before the checkpoint was written")
        else:
            plan = self._reads.as_it_can_run(plan)
            self._conclude("planned", "the checkpoint's plan goes on, unchecked", plan=plan)

    def _check_given(self, given: Plan) -> Steps:
        yield from self._experiments.measure_baseline()
        trial, deferred = None, None
        while trial is None and deferred != self._reads.defers:
            deferred = self._reads.defers
            trial = yield from self._experiments.try_plan(self._reads.as_it_can_run(given), None)
        yield from self._judge([trial], None)

    def _run_unchecked(self) -> Steps:
        """Run the planner's plan as soon as there is a profile; compressed from the first step."""
        profile, network = yield from self._experiments.measure_job(None)
        self._known = Known(profile, network, None)
        self._plan_unchecked(self._known)

    def _plan_unchecked(self, known: Known) -> None:
        expected = self._trials.forecast(known.profile, known.network, [])
        self._trials.report_held_back(expected)
        self._conclude(
            "planned" if expected.plan is not None else "ddp",
            expected.comparison.reason,
            plan=expected.plan,
            forecasts=expected,
        )

    def _check_remembered(self, then: Findings) -> Steps:
        """Run what an earlier start has decided; measure again if its time has changed."""
        self._remembered = None
        expected = then.baseline if then.plan is None else then.planned
        assert then.baseline is not None
        assert expected is not None
        plan = None if then.plan is None else self._reads.as_it_can_run(then.plan)
        text = f"running the saved plan of an earlier start: {expected.name}"
        self.notes.say(text, is_for_users=True)
        tried = self._experiments
        tried.hook = then.hook
        stage = tried.stage("running the saved plan", plan)
        found = yield from tried.measure_until(stage, expected.iteration_s, tried.is_known)
        known = plan == then.plan and not (
            (plan is not None and tried.mismatches(plan, found)) or self._reads.learn(found)
        )
        rate = found.rate(expected.name)
        change = abs(rate.iteration_s / expected.iteration_s - 1)
        noise = CONFIDENCE * math.hypot(rate.noise_s, expected.noise_s) / expected.iteration_s
        figures = (
            f"{expected.name} takes {in_ms(rate.iteration_s)} an iteration, "
            f"{in_ms(expected.iteration_s)} when it was saved"
        )
        if known and change <= max(AS_REMEMBERED, noise):
            gain = "" if plan is None else f", {in_ms(then.baseline.iteration_s)} under DDP"
            self.notes.findings = replace(then, reason=f"{figures}{gain}")
            self.notes.say(self.findings.reason)
            return
        if known and plan is not None and change <= CHANGED:
            self.notes.say(f"{figures}; comparing it with DDP again")
            self.notes.findings = replace(then, plan=None)
            yield from self._experiments.measure_baseline(
                "comparing with DDP", rate.iteration_s, anew=False
            )
            if compare(found.times_s, self._experiments.baseline_s) > 0:
                self._keep_or_drop(Trial(plan, found, rate, None), then)
                return
        if known:
            self.notes.say(f"{figures}; measuring and planning again")
        self.notes.findings = Findings(network=self._settings.network)
        yield from self._measure_and_plan()

    def _measure_and_plan(self) -> Steps:
        if self._known is None:
            self.notes.say(
                "measuring the first iterations and the network, to plan the exchange of "
                "gradients; training goes on meanwhile",
                is_for_users=True,
            )
        found = yield from self._experiments.measure_baseline()
        rate = found.rate("DDP")
        profile, network = yield from self._experiments.measure_job(rate.iteration_s)
        if profile.baseline is None:
            times = Baseline(
                iteration_s=rate.iteration_s, noise_s=rate.noise_s, iterations=rate.iterations
            )
            profile = replace(profile, baseline=times)
        plan = self._settings.ddp.plan(profile, network)
        baseline = Trial(plan, found, rate, None, found.slowdown_s(profile)).measured()
        profile, network, baseline = corrected_by_baseline(baseline, profile, network)
        self._known = Known(profile, network, baseline)
        self.notes.find(profile=profile, network=network)
        yield from self._plan_and_try()

    def _plan_again(self) -> Steps:
        """Plan again with what is now known of the program's reads, without measuring again."""
        if self._known is None:
            yield from self._strategy()
        elif self._known.baseline is None:
            self._with_norm()
            self._plan_unchecked(self._known)
        else:
            yield from self._plan_and_try()

    def _plan_and_try(self) -> Steps:
        """Try the best plans, and keep one of them or DDP's buckets."""
        while True:
            reads, known = self._reads.state, self._with_norm()
            assert known.baseline is not None
            measured, trials = [known.baseline], []
            first = self._trials.forecast(known.profile, known.network, measured)
            self._trials.report_held_back(first)
            if not isinstance(self._settings.compression, Recipe):
                first, measured = yield from self._trials.calibrate(first, known, measured)
            if self._reads.state == reads:
                trials = yield from self._trials.try_best(first, known, measured)
            if self._reads.state == reads:
                break
            # None of the plans predicted and tried can run any more: start again from here.
        yield from self._judge(trials, first)

    def _with_norm(self) -> Known:
        """Add the norm that the program asks for to the profile."""
        assert self._known is not None
        profile = replace(
            self._known.profile, norm=self._reads.norm, sharded=self._reads.deferring.sharded
        )
        self._known = self._known._replace(profile=profile)
        self.notes.find(profile=profile)
        return self._known

    # ------------------------------------------------------------------ judging

    def _judge(self, tried: Sequence[Trial | None], forecasts: Forecasts | None) -> Steps:
        """Keep the best plan that was tried, unless DDP's buckets are faster."""
        trials = [trial for trial in tried if trial is not None]
        if not trials:
            reason = "DDP's reducer did not take the plan's messages as its buckets"
            if forecasts is not None and not tried:
                reason = forecasts.comparison.reason
            self._conclude("ddp", reason, forecasts=forecasts)
            return
        best = min(trials, key=lambda trial: trial.rate.iteration_s)
        gain_s = self._experiments.baseline.iteration_s - best.rate.iteration_s
        if gain_s <= self._noise_s(best):
            yield from self._judge_again(best)
        else:
            self._keep_or_drop(best)

    def _judge_again(self, trial: Trial) -> Steps:
        """Measure baseline and plan once more, in this order; twice if that changes the result.

        The machine itself may have become slower since the baseline was measured, or may be slow
        for a moment. Measuring the plan before and after the baseline cancels a steady drift.
        """
        baseline = self._experiments.baseline
        judged, faster = trial, [trial.rate.iteration_s <= baseline.iteration_s]
        while faster.count(faster[-1]) < 2:
            yield from self._experiments.measure_baseline("comparing with DDP", anew=False)
            reads = self._reads.state
            again = yield from self._experiments.try_plan(trial.plan, trial.forecasts, "comparing")
            if self._reads.state != reads:
                yield from self._plan_again()
                return
            if again is None:
                break
            judged = trial._replace(rate=_mean(trial.rate, again.rate))
            baseline = self._experiments.baseline
            faster.append(judged.rate.iteration_s <= baseline.iteration_s)
            trial = again
        self._keep_or_drop(judged)

    def _keep_or_drop(self, trial: Trial, then: Findings | None = None) -> None:
        """Decide by the last measurements; ``then`` holds the predictions of an earlier start."""
        baseline = self._experiments.baseline
        figures = (
            f"{trial.plan.planner} took {in_ms(trial.rate.iteration_s)} an iteration, "
            f"{baseline.name} {in_ms(baseline.iteration_s)} (noise {in_ms(self._noise_s(trial))})"
        )
        if trial.rate.iteration_s > baseline.iteration_s:
            reason = f"{figures}; back to DDP's buckets"
            reason += "" if self._experiments.hook is None else " and the hook"
            if trial.plan.is_sparse or trial.plan.wire == "int8":
                reason += ", dense; the residuals are sent with later gradients"
            self._conclude("reverted", reason, trial=trial, forecasts=trial.forecasts)
            return
        if trial.plan.wait == "need":
            figures += "; updates are deferred to the next forward pass"
        self._conclude(
            "planned", figures, plan=trial.plan, trial=trial, forecasts=trial.forecasts, then=then
        )

    def _noise_s(self, trial: Trial) -> float:
        return CONFIDENCE * math.hypot(trial.rate.noise_s, self._experiments.baseline.noise_s)

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
        """Record a decision, together with the predictions made before it."""
        self._forecasts = forecasts
        expected = Findings() if then is None else then
        network = self.findings.network
        if forecasts is not None:
            network = forecasts.network
            hook = self._experiments.hook
            baseline = self._settings.ddp.plan(forecasts.profile, network)
            baseline = baseline if hook is None else compressed(baseline, hook)
            running = plan or baseline
            chosen = trial.plan if trial is not None else plan
            comparison = forecasts.comparison
            lossy = None
            if self._settings.compression is None:
                dense_s = comparison.of(comparison.chosen).iteration_s
                defers = self._reads.defers
                lossy = suggestion(forecasts.profile, network, dense_s, defers=defers)
            expected = Findings(
                comparison=replace(
                    comparison, chosen=running.planner, reason=reason, suggestion=lossy
                ),
                costs=forecasts.compressing if running.is_sparse else None,
                predicted_baseline_s=forecasts.predicted_s(baseline.planner),
                predicted_planned_s=forecasts.predicted_s(chosen.planner) if chosen else None,
            )
        self.notes.findings = replace(
            expected,
            profile=self.findings.profile,
            network=network,
            plan=plan,
            hook=self._experiments.hook,
            baseline=self.findings.baseline,
            planned=trial.rate if trial else None,
            decision=decision,
            reason=reason,
        )
        level = logging.WARNING if decision == "reverted" else logging.INFO
        is_for_users = forecasts is not None or trial is not None
        self.notes.say(reason, level, is_for_users=is_for_users)


def _mean(one: Rate, other: Rate) -> Rate:
    """Return the mean of two measurements of the same plan."""
    return Rate(
        name=one.name,
        iteration_s=(one.iteration_s + other.iteration_s) / 2,
        noise_s=math.hypot(one.noise_s, other.noise_s) / 2,
        iterations=one.iterations + other.iterations,
    )
