"""The verdict in a sentence, and its key figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from syncline.files.report import units
from syncline.files.report.bundle import Bundle
from syncline.files.report.whatif_words import notable_settings, setting_text
from syncline.plan.document import Value
from syncline.plan.prediction import Comparison, Prediction
from syncline.plan.profile import Baseline
from syncline.plan.run import Rate, Run
from syncline.plan.whatif import WhatIf

RESULTS_SHOWN = 2  # results of the training among the key figures; all of them are in report.json

DDP = "ddp"  # the planner with the buckets of torch's DistributedDataParallel


class Verdict(Value, frozen=True):
    """The outcome: what happened, what was expected, and the reason for the decision."""

    headline: str
    detail: str = ""

    @property
    def sentence(self) -> str:
        """Headline and detail as one sentence."""
        return f"{self.headline}; {self.detail}." if self.detail else f"{self.headline}."


def number(value: float) -> float | None:
    """Return a number, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value


class KeyFigure(Value, frozen=True):
    """One number worth knowing first."""

    name: str
    label: str
    value: float | None  # None where a training's result is not a number
    unit: str  # ``s``, ``fraction``, ``iterations``, ``samples/s``, or empty
    noise: float | None = None  # standard error, in the unit of the value
    note: str = ""


def figure_text(figure: KeyFigure) -> str:
    """Return the figure's value with its noise and unit, as people read it."""
    if figure.value is None:
        return units.plain(math.nan)
    if figure.unit == "s":
        if figure.noise is None:
            return units.duration(figure.value)
        return units.with_noise(figure.value, figure.noise)
    if figure.unit == "fraction":
        if figure.noise is None:
            return units.percent(figure.value)
        return f"{figure.value * 100:.1f} ± {figure.noise * 100:.1f} %"
    return f"{units.plain(figure.value)} {figure.unit}".strip()


def _gain(baseline: Rate, planned: Rate) -> tuple[float, float]:
    """Return the time saved as a fraction of the baseline, with its standard error."""
    ratio, noise = planned.over(baseline)
    return 1 - ratio, noise


def _against(gain: float, noise: float | None = None) -> str:
    """Return a gain in words: ``21.9 ± 0.7 % less`` (time), or ``more`` if it is negative."""
    more_or_less = "less" if gain >= 0 else "more"
    error = "" if noise is None else f" ± {noise * 100:.1f}"
    return f"{abs(gain) * 100:.1f}{error} % {more_or_less}"


def _prediction(bundle: Bundle) -> Prediction | None:
    """Return the prediction for the plan that ran or, without a run, was chosen."""
    if bundle.comparison is None:
        return None
    by_name = {p.planner: p for p in bundle.comparison.predictions}
    planner = bundle.run.planner if bundle.run else bundle.comparison.chosen
    return by_name.get(planner, by_name[bundle.comparison.chosen])


def verdict(bundle: Bundle) -> Verdict:
    """Return what was measured, predicted and decided, and why."""
    if bundle.run:
        return _verdict_on_run(bundle.run, bundle.comparison)
    if bundle.what_if:
        return _verdict_on_what_if(bundle.what_if)
    if bundle.comparison:
        return _verdict_on_comparison(bundle.comparison)
    return Verdict(headline=_what_it_holds(bundle))


def _what_it_holds(bundle: Bundle) -> str:
    """Return a sentence on the first part the bundle has: profile, plan, network or timeline."""
    if profile := bundle.profile:
        return (
            f"One iteration of {profile.model} computes for "
            f"{units.duration(profile.computation_s)} and leaves "
            f"{units.size(profile.gradient_bytes)} of gradients to exchange"
        )
    if plan := bundle.plan:
        gradients = units.counted(len(plan.tensors), "gradient")
        messages = units.counted(len(plan.messages), "message")
        return f"The {plan.planner} plan sends the {gradients} of {plan.model} in {messages}"
    if network := bundle.network:
        return (
            f"An all-reduce among {units.counted(network.workers, 'worker')} of "
            f"{network.name} takes {units.duration(network.all_reduce.latency_s)} to start and "
            f"{units.duration(network.all_reduce.seconds(10**8))} for 100 MB"
        )
    timeline = bundle.timelines()[0]
    took = units.duration(timeline.iteration_ns / 1e9)
    return f"One iteration of {timeline.name} takes {took} ({timeline.source})"


def _verdict_on_run(run: Run, comparison: Comparison | None) -> Verdict:
    where = f"{run.model} on {units.counted(run.workers, 'worker')}"
    reason = run.reason.rstrip(". ")
    headline = {
        "planned": f"{where} trains with the {run.planner} plan",
        "reverted": f"The plan for {where} lost against DDP and was dropped",
        "ddp": f"DDP stays for {where}",
        "undecided": f"The run of {where} ended before Syncline had decided",
    }[run.decision]
    if run.baseline:
        baseline = units.with_noise(run.baseline.iteration_s, run.baseline.noise_s)
        if run.decision == "ddp":
            headline += f", at {baseline} an iteration"
        elif run.decision != "undecided" and run.planned:
            change = _against(*_gain(run.baseline, run.planned))
            planned = units.with_noise(run.planned.iteration_s, run.planned.noise_s)
            headline = {
                "planned": f"With the {run.planner} plan, {where} trains in {planned} an "
                f"iteration, {change} than the {baseline} of {run.baseline.name}",
                "reverted": f"The plan for {where} took {planned} an iteration, {change} than "
                f"the {baseline} of {run.baseline.name}, and was dropped",
            }[run.decision]
    if run.decision == "planned" and run.messages:
        reason = f"the plan of {units.counted(run.messages, 'message')} stays: {reason}"
    return Verdict(headline, "; ".join(filter(None, (_expected(run, comparison), reason))))


def _expected(run: Run, comparison: Comparison | None) -> str:
    if run.decision in ("planned", "reverted") and run.predicted_planned_s is not None:
        text = f"{units.duration(run.predicted_planned_s)} was predicted"
        if run.planned is None:
            return text
        error = run.predicted_planned_s / run.planned.iteration_s - 1
        return f"{text} ({units.percent(error, signed=True)})"
    if run.decision == "ddp" and comparison and run.predicted_baseline_s:
        best = min(comparison.predictions, key=lambda p: p.iteration_s)
        change = _against(1 - best.iteration_s / run.predicted_baseline_s)
        return (
            f"the best plan, {best.planner}, was predicted to take "
            f"{units.duration(best.iteration_s)}, {change} than the "
            f"{units.duration(run.predicted_baseline_s)} predicted for DDP"
        )
    return ""


def _verdict_on_comparison(comparison: Comparison) -> Verdict:
    chosen = comparison.of(comparison.chosen)
    where = f"{comparison.model} on {units.counted(comparison.workers, 'worker')}"
    headline = (
        f"For {where} of {comparison.network}, {chosen.planner} is predicted to take "
        f"{units.duration(chosen.iteration_s)} an iteration"
    )
    ddp = next((p for p in comparison.predictions if p.planner == DDP), chosen)
    if ddp is not chosen and ddp.iteration_s > 0:
        change = _against(1 - chosen.iteration_s / ddp.iteration_s)
        headline += f", {change} than the {units.duration(ddp.iteration_s)} of DDP"
    return Verdict(headline, comparison.reason.rstrip(". "))


def key_figures(bundle: Bundle) -> tuple[KeyFigure, ...]:
    """Return the figures worth knowing first, in the order in which they are read."""
    return (
        *_measured_figures(bundle),
        *_predicted_figures(bundle),
        *(_what_if_figures(bundle.what_if) if bundle.what_if else ()),
        *(_training_figures(bundle.run) if bundle.run else ()),
    )


def _measured_figures(bundle: Bundle) -> Iterator[KeyFigure]:
    before = bundle.run.baseline if bundle.run else None
    planned = bundle.run.planned if bundle.run else None
    if baseline := before or (bundle.profile.baseline if bundle.profile else None):
        yield _time("baseline", "DDP, measured", baseline)
    if planned:
        yield _time("planned", "Syncline, measured", planned)
    if before and planned:
        gain, noise = _gain(before, planned)
        label, less = ("Gain", "less") if gain >= 0 else ("Loss", "more")
        note = f"{less} time an iteration than DDP"
        yield KeyFigure("gain", label, abs(gain), "fraction", noise, note)


def _time(name: str, label: str, rate: Rate | Baseline) -> KeyFigure:
    note = f"median of {units.counted(rate.iterations, 'iteration')}"
    return KeyFigure(name, label, rate.iteration_s, "s", rate.noise_s, note)


def _predicted_figures(bundle: Bundle) -> Iterator[KeyFigure]:
    run, prediction = bundle.run, _prediction(bundle)
    predicted_s = run.predicted_s if run else None
    if predicted_s is None and prediction:
        predicted_s = prediction.iteration_s
    if predicted_s is not None:
        planner = run.planner if run else prediction.planner if prediction else ""
        note = f"an iteration under {planner}"
        if run and run.prediction_error is not None:
            note = f"{units.percent(run.prediction_error, signed=True)} against the measurement"
        elif prediction and prediction.iteration_s == predicted_s and prediction.interval_s:
            note += f"; 90 % interval: {units.between(prediction.interval_s)}"
        yield KeyFigure("predicted", "Predicted", predicted_s, "s", note=note)
    if prediction:
        note = f"beyond the {units.duration(prediction.computation_s)} of computing alone"
        yield KeyFigure("exposed", "Added by messages", prediction.exposed_s, "s", note=note)
        above = prediction.distance_to_bound
        if above < 1:  # a bound of less than half of the iteration says nothing about it
            note = f"no schedule can be below {units.duration(prediction.lower_bound_s)}"
            yield KeyFigure("above_bound", "Above the lower bound", above, "fraction", note=note)


def _training_figures(run: Run) -> Iterator[KeyFigure]:
    if run.overhead_iterations is not None:
        note = "of DDP, spent on measuring and planning"
        spent = run.overhead_iterations
        yield KeyFigure("overhead", "Cost of measuring", spent, "iterations", note=note)
    for rate in run.rates:
        name, label = f"rate: {rate.name}", f"{rate.name}, whole run"
        count = units.counted(rate.iterations, "iteration")
        time_s, noise_s = rate.iteration_s, rate.noise_s
        if rate.samples_per_s is None:
            yield KeyFigure(name, label, time_s, "s", noise_s, f"over {count}")
        else:
            note = f"{count} of {units.with_noise(time_s, noise_s)}"
            yield KeyFigure(name, label, rate.samples_per_s, "samples/s", note=note)
    for name, result in itertools.islice(run.results.items(), RESULTS_SHOWN):
        yield KeyFigure(f"result: {name}", name.capitalize(), number(result), "")


def _verdict_on_what_if(what_if: WhatIf) -> Verdict:
    """Return what limits the chosen point, and what would lift the limit."""
    limit, _, remedy = what_if.bottleneck.sentence.partition("; ")
    setting = what_if.chosen.setting
    place = setting_text(setting, notable_settings(setting))
    planner = what_if.bottleneck.planner
    return Verdict(f"{what_if.model} on {place}, planned by {planner}, is {limit}", remedy)


def _what_if_figures(what_if: WhatIf) -> Iterator[KeyFigure]:
    """Yield the figures of the chosen point."""
    point, best = what_if.chosen, what_if.chosen.of(what_if.bottleneck.planner)
    note = f"of {units.counted(point.setting.workers, 'worker')}, against one without communication"
    yield KeyFigure("speed_up", "Speed-up", point.speed_up(best), "", note=note)
    note = f"one such worker takes {units.duration(point.alone_s)}"
    yield KeyFigure("efficiency", "Efficiency", point.efficiency(best), "fraction", note=note)
