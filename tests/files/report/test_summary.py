"""The verdict, the figures and the tables say what the inputs say."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from syncline.files.report.bundle import Bundle
from syncline.files.report.summary import Summary, network_facts, summarise
from syncline.files.report.verdict import figure_text
from syncline.plan.cost import CostCurve
from syncline.plan.network import Measurement, Network
from syncline.plan.run import Decision, PhaseSpan, Rate, Run
from tests.words import assert_tells

change = msgspec.structs.replace


def _rate(iteration_s: float, noise_s: float) -> Rate:
    return Rate(name="x", iteration_s=iteration_s, noise_s=noise_s, iterations=50)


def test_a_phase_costs_what_it_takes_beyond_final_iterations(bundle: Bundle) -> None:
    assert bundle.run is not None
    spans = (
        PhaseSpan(name="measuring DDP", start=1, iterations=4, seconds=4.0),
        PhaseSpan(name="steady", start=5, iterations=9, seconds=8.0),
        PhaseSpan(name="measuring DDP", start=14, iterations=2, seconds=2.5),
        PhaseSpan(name="steady", start=16, iterations=5, seconds=4.0),
    )
    final = _rate(0.8, 0.01)
    run = change(bundle.run, phases=spans, steady=final, baseline=_rate(1.2, 0.01), planned=final)

    def costs(run: Run) -> dict[str, float | None]:
        facts = summarise(Bundle(run=run)).run
        assert facts is not None
        return {f"{phase.start} {phase.name}": phase.cost_s for phase in facts.phases}

    assert costs(run) == {
        "1 measuring DDP": pytest.approx(0.8),
        "5 steady": None,
        "14 measuring DDP": pytest.approx(0.9),
        "16 running merge, 1.50x DDP": None,
    }
    undecided = change(run, decision="undecided", phases=spans[:1], steady=None)
    assert costs(undecided) == {"1 measuring DDP": None}


def _sentence(bundle: Bundle, decision: Decision, planned_s: float = 0.8) -> str:
    assert bundle.run is not None
    run = change(
        bundle.run,
        decision=decision,
        reason="because.",
        baseline=_rate(1.0, 0.01),
        planned=_rate(planned_s, 0.006),
        predicted_planned_s=0.784,
        predicted_baseline_s=0.99,
        messages=7,
    )
    return summarise(Bundle(run=run, comparison=bundle.comparison)).verdict.sentence


def test_a_gain_is_given_with_its_noise(bundle: Bundle) -> None:
    # noise of the ratio: 0.8 * hypot(0.006 / 0.8, 0.01 / 1.0) = 0.0100
    told = _sentence(bundle, "planned")
    assert_tells(told, "merge", "resnet18", "4 workers", "800.0 ± 6.0 ms", "20.0 ± 1.0 %")
    assert_tells(told, "1.000 ± 0.010 s", "784 ms", "-2.0 %", "7 messages", "because")


def test_a_loss_is_called_one(bundle: Bundle) -> None:
    text = _sentence(bundle, "reverted", planned_s=1.1)
    assert "10.0 ± 1.3 % more than the 1.000 ± 0.010 s of x, and was dropped" in text


def test_keeping_ddp_says_what_the_best_plan_would_have_taken(bundle: Bundle) -> None:
    text = _sentence(bundle, "ddp")
    assert text.startswith("DDP stays for resnet18 on 4 workers, at 1.000 ± 0.010 s")
    assert "the best plan, pace, was predicted to take 553 ms" in text


def test_an_undecided_run_says_so(bundle: Bundle) -> None:
    assert "ended before Syncline had decided; because." in _sentence(bundle, "undecided")


@pytest.mark.parametrize("decision", ["planned", "ddp", "reverted", "undecided"])
def test_every_decision_reads_without_measurements(bundle: Bundle, decision: Decision) -> None:
    assert bundle.run is not None
    run = change(
        bundle.run,
        decision=decision,
        baseline=None,
        planned=None,
        predicted_baseline_s=None,
        predicted_planned_s=None,
        rates=(),
    )
    summary = summarise(Bundle(run=run))
    assert "resnet18 on 4 workers" in summary.verdict.sentence
    assert not summary.checks


def test_a_simulation_compares_with_stock_ddp(bundle: Bundle) -> None:
    sentence = summarise(Bundle(comparison=bundle.comparison)).verdict.sentence
    assert "merge is predicted to take 569 ms an iteration, 13.9 % less than the 661 ms" in sentence


def test_figures_come_in_the_order_in_which_they_are_read(bundle: Bundle) -> None:
    figures = summarise(bundle).figures
    assert [figure.name for figure in figures] == [
        "baseline",
        "planned",
        "gain",
        "predicted",
        "exposed",
        "above_bound",
        "overhead",
        "rate: Syncline",
        "rate: DDP",
        "result: test accuracy",
    ]
    texts = {figure.name: figure_text(figure) for figure in figures}
    assert texts["baseline"] == "711.8 ± 3.1 ms"
    assert texts["overhead"] == "23.4 iterations"
    assert texts["result: test accuracy"] == "0.9312"


def test_a_bound_that_says_nothing_is_not_shown(bundle: Bundle) -> None:
    assert bundle.comparison is not None
    predictions = tuple(
        msgspec.structs.replace(p, lower_bound_s=p.iteration_s / 2)
        for p in bundle.comparison.predictions
    )
    comparison = msgspec.structs.replace(bundle.comparison, predictions=predictions)
    summary = summarise(dataclasses.replace(bundle, comparison=comparison))
    names = [figure.name for figure in summary.figures]
    assert "exposed" in names
    assert "above_bound" not in names


def test_planners_are_sorted_by_time_and_one_is_chosen(bundle: Bundle) -> None:
    planners = summarise(bundle).planners
    assert planners is not None
    times = [row.iteration_s for row in planners.rows]
    assert times == sorted(times)
    assert [row.planner for row in planners.rows if row.chosen] == ["merge"]


def test_checks_are_signed_relative_to_the_measurement(bundle: Bundle) -> None:
    checks = {check.what: check for check in summarise(bundle).checks}
    planned = checks["iteration, merge plan"]
    assert planned.error == pytest.approx(planned.predicted_s / planned.measured_s - 1)
    assert planned.noise_s == 0.0024
    assert checks["its exposed communication"].noise_s is None


def test_a_fit_error_that_was_not_recorded_is_computed() -> None:
    network = Network(
        name="n",
        workers=2,
        all_reduce=CostCurve.line(0.0, 1e-3),
        points=tuple(
            Measurement(size_bytes=size, time_s=time_s, repetitions=3)
            for size, time_s in ((10, 0.01), (20, 0.04), (0, 0.0))
        ),
    )
    facts = network_facts(network)
    assert facts.fit_error == pytest.approx(0.25)
    assert facts.fit_error_max == pytest.approx(0.5)
    assert facts.points[0].error is None


def test_a_training_that_diverged_has_results_that_are_no_numbers(bundle: Bundle) -> None:
    assert bundle.run is not None
    run = change(bundle.run, results={"loss": math.nan})
    summary = summarise(dataclasses.replace(bundle, run=run))
    assert summary.figures[-1].value is None
    assert figure_text(summary.figures[-1]) == "NaN"
    assert Summary.from_json(summary.to_json()) == summary
