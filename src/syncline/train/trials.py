"""Generators of steps that calibrate predictions, then try the most promising plans. Pure."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planner_named
from syncline.plan.planners.auto import CONFIDENCE, Auto, choose
from syncline.plan.planners.compressed import choose_compressed, compressed
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.decoupled import in_equal_parts
from syncline.plan.profile import Profile
from syncline.plan.recipe import Recipe
from syncline.plan.simulator.contention import MANY, Measured, fit_contention
from syncline.train.engine.layout import needs_engine
from syncline.train.experiments import (
    DETAILED_FROM_S,
    MOST_COMPARED,
    Experiments,
    Forecasts,
    Trial,
    Tried,
    in_ms,
)
from syncline.train.stages import Measurement, Settings, Step

CALIBRATION_PARTS = (4, 12)
"""Numbers of messages for measuring the engine: few and many, to see how much each message slows
computing. With a norm, each is a reduce-scatter and an all-gather. DDP's reducer is measured with
the larger number only, or a still larger one if the DDP baseline has as many."""
LEAST_CALIBRATED = 3
MOST_CALIBRATED = 12
CALIBRATED_S = 0.5
"""Calibrating measures for CALIBRATED_S, at least LEAST_CALIBRATED iterations, then up to
MOST_CALIBRATED until their error is COMPARED_NOISE. With only two, an interruption would count."""
CONTENDED = 1.1
"""If long iterations of the baseline show less contention than this, the engine is not calibrated
before a trial: calibrating costs most there, and factors from few iterations are uncertain."""
AS_PREDICTED = 0.03  # a trial confirms its prediction if its time is within this share of it
CALIBRATION_GAIN = 0.05
"""Overlapping is calibrated, or tried again, only if it may gain this share of an iteration."""
LEAST_GAIN = 0.01
"""A plan that is predicted to gain this share is tried, however noisy the DDP baseline is: a trial
costs almost nothing if the plan is as fast."""
TRIALS = 3
"""At most this many plans are tried, another only if the last trial differed from its prediction.
Then one more may be tried that only the fitted contention speaks against."""


class Known(NamedTuple):
    """The basis on which all plans of a training are made and judged."""

    profile: Profile
    network: Network
    baseline: Measured | None  # iterations under DDP's buckets; None where nothing is checked


class Trials:
    """Plans, tried one after the other."""

    def __init__(self, experiments: Experiments) -> None:
        self._experiments = experiments
        self._settings = experiments.settings
        self._reads = experiments.reads
        self._notes = experiments.notes

    def forecast(
        self, profile: Profile, network: Network, measured: Sequence[Measured]
    ) -> Forecasts:
        """Predict all planners from what was measured so far."""
        baseline = profile.baseline
        if baseline is not None and self._settings.check:
            noise_s = min(baseline.noise_s, LEAST_GAIN * baseline.iteration_s / CONFIDENCE)
            profile = replace(profile, baseline=replace(baseline, noise_s=noise_s))
        return forecast(profile, network, self._settings, measured, defers=self._reads.defers)

    def report_held_back(self, expected: Forecasts) -> None:
        """Report if the plan asked for needs an optimizer that defers its update."""
        if expected.held_back:
            self._reads.report_held_back(self._settings.planner)

    def try_best(
        self, first: Forecasts, known: Known, measured: Sequence[Measured]
    ) -> Generator[Step, Measurement, list[Trial | None]]:
        """Try the plan that is expected to be the best; if its prediction was wrong, another."""
        settings, baseline, expected = self._settings, self._experiments.baseline, first
        trials: list[Trial | None] = []
        measured = list(measured)
        tried: list[Plan] = []
        while expected.plan is not None and len(trials) < TRIALS:
            trial = yield from self._try(expected)
            trials.append(trial)
            if trial is None or isinstance(settings.compression, Recipe):
                break
            if settings.planner != Auto.NAME or self._is_as_predicted(trial):
                break
            measured.append(trial.measured())
            tried.append(trial.plan)
            expected = self.forecast(known.profile, known.network, measured)
            best_s = min(m.iteration_s for m in measured)
            name = expected.comparison.chosen
            least_gain_s = min(CONFIDENCE * baseline.noise_s, LEAST_GAIN * baseline.iteration_s)
            if expected.plan in tried or expected.predicted_s(name) > best_s - least_gain_s:
                break
        eased = self._eased(known, expected.network, trials)
        if eased is not None:
            trials.append((yield from self._try(eased)))
        return trials

    def _try(self, expected: Forecasts) -> Tried:
        """Try the plan that was chosen."""
        assert expected.plan is not None
        predicted_s = expected.predicted_s(expected.plan.planner)
        self._notes.say(
            f"trying {expected.plan.planner}, which is predicted to take {in_ms(predicted_s)} an "
            f"iteration; {self._experiments.baseline.name} takes "
            f"{in_ms(self._experiments.baseline.iteration_s)}",
            is_for_users=True,
        )
        return (yield from self._experiments.try_plan(expected.plan, expected))

    def _eased(
        self, known: Known, fitted: Network, trials: Sequence[Trial | None]
    ) -> Forecasts | None:
        """Return the forecasts under half the fitted contention if deferring gains much there.

        Contention is fitted to few iterations, each of which other work may have slowed. So if it
        alone speaks against deferring updates, a trial decides.
        """
        settings = self._settings
        if settings.planner != Auto.NAME or isinstance(settings.compression, Recipe):
            return None
        if not self._reads.defers or any(t is None or t.plan.wait == "need" for t in trials):
            return None
        rates = [trial.rate for trial in trials if trial is not None]
        best_s = min(rate.iteration_s for rate in (self._experiments.baseline, *rates))
        found = self.forecast(known.profile, _contended(fitted, 0.5), [])
        if found.plan is None or found.plan.wait != "need":
            return None
        gain_s = best_s - found.predicted_s(found.plan.planner)
        return found if gain_s >= CALIBRATION_GAIN * best_s else None

    def _is_as_predicted(self, trial: Trial) -> bool:
        """Whether the plan took as long as predicted, so that no prediction changes."""
        assert trial.forecasts is not None
        predicted_s = trial.forecasts.predicted_s(trial.plan.planner)
        error_s = abs(trial.rate.iteration_s - predicted_s)
        noise_s = CONFIDENCE * trial.rate.noise_s
        return error_s <= max(AS_PREDICTED * trial.rate.iteration_s, noise_s)

    def calibrate(
        self, first: Forecasts, known: Known, measured: list[Measured]
    ) -> Generator[Step, Measurement, tuple[Forecasts, list[Measured]]]:
        """Measure the reducer or the engine under simple plans, if that improves predictions.

        After the engine was measured, a plan of the reducer may become the best.
        """
        assert known.baseline is not None
        baseline = known.baseline.plan
        reads = self._reads.state
        ran: list[list[Plan]] = [[]]
        for parts_for in (self._reducer_parts, self._parts_by_need, self._reducer_parts):
            plans = parts_for(first, baseline)
            if plans in ran or reads != self._reads.state:
                continue
            ran.append(plans)
            more = yield from self._run_parts(plans)
            measured = [*measured, *(more or [])]
            first = self.forecast(known.profile, known.network, measured)
        return first, measured

    def _reducer_parts(self, first: Forecasts, baseline: Plan) -> list[Plan]:
        """Return the plan under which to measure DDP's reducer before a trial, if any.

        The DDP baseline's messages do not show how much each of many messages slows computing.
        """
        plan, many = first.plan, MANY * len(baseline.messages)
        if plan is None or needs_engine(plan):
            return []
        parts = max(CALIBRATION_PARTS[-1], many + len(baseline.messages))
        found = in_equal_parts(first.profile, first.network, parts, by_need=False)
        return [found] if min(len(p.messages) for p in (plan, found)) > many else []

    def _parts_by_need(self, first: Forecasts, _: Plan) -> list[Plan]:
        """Return the plans under which to measure the engine before a trial, if any.

        No earlier measurement shows how much the engine slows computing, as DDP's own messages
        use another library. If those show no contention, they may overlap too little to show it.
        So the engine is also measured if it would gain much without any contention.
        """
        plan = first.plan
        # Unless updates can wait, no plan of the engine can run.
        if not self._reads.defers:
            return []
        if plan is None or plan.wait != "need":
            free = self.forecast(first.profile, _contended(first.network, 0.0), [])
            baseline_s = free.predicted_s(Ddp.NAME)
            gain_s = baseline_s - free.predicted_s(free.comparison.chosen)
            plan = free.plan if gain_s >= CALIBRATION_GAIN * baseline_s else None
        elif self._experiments.baseline.iteration_s >= DETAILED_FROM_S:
            found = first.network.contention
            if max(found.computing, found.exchange) < CONTENDED:
                return []
        if plan is None or plan.wait != "need":
            return []
        return [in_equal_parts(first.profile, first.network, n) for n in CALIBRATION_PARTS]

    def _run_parts(
        self, plans: Sequence[Plan]
    ) -> Generator[Step, Measurement, list[Measured] | None]:
        """Train under simple plans, rather than predicted ones; return None if one fails."""
        found: list[Measured] = []
        iterations = math.ceil(CALIBRATED_S / self._experiments.baseline.iteration_s)
        least = min(max(iterations, LEAST_CALIBRATED), MOST_COMPARED[1])
        wire = self._settings.wire
        for each in plans:
            plan = each if wire is None else compressed(each, wire)
            stage = self._experiments.stage(f"calibrating with {plan.planner}", plan)
            most = max(least, MOST_CALIBRATED)
            measured = yield from self._experiments.measure(
                stage, least, most, self._experiments.is_known
            )
            trial = self._experiments.trial_of(plan, measured, None)
            if trial is None:
                return None
            found.append(trial.measured())
        return found


def forecast(
    profile: Profile,
    network: Network,
    settings: Settings,
    measured: Sequence[Measured],
    *,
    defers: bool,
) -> Forecasts:
    """Compare all planners and choose the plan to try; O(N^2) for N tensors.

    The network is as probed or given; its contention is fitted to what was ``measured`` under the
    baseline and the plans tried. ``defers``: an update can wait for the next forward pass.
    """
    network = fit_contention(profile, network, measured)
    asked = None if settings.planner == Auto.NAME else planner_named(settings.planner)
    if settings.compression is not None:
        lossy = choose_compressed(
            profile, network, settings.compression, planner=asked, ddp=settings.ddp, defers=defers
        )
        return Forecasts(
            profile,
            network,
            lossy.comparison,
            plan=lossy.plan,
            held_back=lossy.deferring and not defers,
            compressing=lossy.network,
        )
    others = () if asked is None else (asked,)
    choice = choose(
        profile, network, ddp=settings.ddp, others=others, defers=defers, suggests=False
    )
    comparison = choice.comparison
    if asked is not None:
        reason = f"{settings.planner} was asked for"
        comparison = replace(comparison, chosen=asked.NAME, reason=reason)
    chosen = comparison.chosen
    return Forecasts(
        profile,
        network,
        comparison,
        plan=None if chosen == Ddp.NAME else choice.plans[chosen],
        held_back=chosen in choice.deferring and not defers,
    )


def _contended(network: Network, share: float) -> Network:
    """Return a network with this share of its contention."""

    def part(found: Contention | None) -> Contention | None:
        if found is None:
            return None
        return replace(
            found,
            computing=1 + (found.computing - 1) * share,
            exchange=1 + (found.exchange - 1) * share,
            per_message_s=found.per_message_s * share,
        )

    return replace(
        network,
        contention=part(network.contention),
        contention_by_need=part(network.contention_by_need),
    )
