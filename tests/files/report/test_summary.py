"""The verdict, the figures and the tables say what the inputs say."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from syncline.files.report.bundle import Bundle
from syncline.files.report.summary import Summary, network_facts, summarise, timeline_facts
from syncline.files.report.verdict import figure_text
from syncline.plan.network import Measurement, Network
from syncline.plan.run import Decision, PhaseSpan, Run
from tests.plan.documents import rate
from tests.words import assert_tells

change = msgspec.structs.replace


def test_a_phase_costs_what_it_takes_beyond_final_iterations(bundle: Bundle) -> None:
    spans = tuple(
        PhaseSpan(name=name, start=start, iterations=iterations, seconds=seconds)
        for name, start, iterations, seconds in (
            ("measuring DDP", 1, 4, 4.0),
            ("steady", 5, 9, 8.0),
            ("measuring DDP", 14, 2, 2.5),
            ("steady", 16, 5, 4.0),
        )
    )
    final = rate(0.8, 0.01)
    run = change(bundle.run, phases=spans, steady=final, baseline=rate(1.2, 0.01), planned=final)

    def costs(run: Run) -> dict[str, float | None]:
        phases = summarise(Bundle(run=run)).run.phases
        return {f"{phase.start} {phase.name}": phase.cost_s for phase in phases}

    assert costs(run) == {
        "1 measuring DDP": pytest.approx(0.8),
        "5 steady": None,
        "14 measuring DDP": pytest.approx(0.9),
        "16 running merge, 1.50x DDP": None,
    }
    undecided = change(run, decision="undecided", phases=spans[:1], steady=None)
    assert costs(undecided) == {"1 measuring DDP": None}


@pytest.mark.parametrize(
    ("decision", "planned_s", "tells"),
    [
        # noise of the ratio: 0.8 * hypot(0.006 / 0.8, 0.01 / 1.0) = 0.0100
        ("planned", 0.8, ("merge", "resnet18", "4 workers", "800.0 ± 6.0 ms", "20.0 ± 1.0 %")),
        ("planned", 0.8, ("1.000 ± 0.010 s", "784 ms", "-2.0 %", "7 messages", "because")),
        ("reverted", 1.1, ("10.0 ± 1.3 % more", "1.000 ± 0.010 s", "dropped")),
        ("ddp", 0.8, ("DDP stays", "resnet18", "4 workers", "1.000 ± 0.010 s", "merge", "622 ms")),
        ("undecided", 0.8, ("ended before", "because")),
    ],
)
def test_a_decision_is_told_with_its_reason(
    bundle: Bundle, decision: Decision, planned_s: float, tells: tuple[str, ...]
) -> None:
    run = change(
        bundle.run,
        decision=decision,
        reason="because.",
        baseline=rate(1.0, 0.01),
        planned=rate(planned_s, 0.006),
        predicted_planned_s=0.784,
        predicted_baseline_s=0.99,
        messages=7,
    )
    assert_tells(summarise(replace(bundle, run=run)).verdict.sentence, *tells)
    unmeasured = ("baseline", "planned", "predicted_baseline_s", "predicted_planned_s")
    run = change(run, rates=(), **dict.fromkeys(unmeasured))
    summary = summarise(Bundle(run=run))
    assert_tells(summary.verdict.sentence, "resnet18 on 4 workers")
    assert not summary.checks


def test_a_simulation_compares_with_ddp(bundle: Bundle) -> None:
    sentence = summarise(Bundle(comparison=bundle.comparison)).verdict.sentence
    assert_tells(sentence, "merge", "622 ms", "6.7 % less", "666 ms", "DDP")


def test_figures_come_in_the_order_in_which_they_are_read(bundle: Bundle) -> None:
    texts = {figure.name: figure_text(figure) for figure in summarise(bundle).figures}
    measured = ("baseline", "planned", "gain", "predicted", "exposed", "above_bound", "overhead")
    assert tuple(texts) == (*measured, "rate: Syncline", "rate: DDP", "result: test accuracy")
    assert texts["baseline"] == "711.8 ± 3.1 ms"
    assert texts["overhead"] == "23.4 iterations"
    assert texts["result: test accuracy"] == "0.9312"


def test_a_bound_that_says_nothing_is_not_shown(bundle: Bundle) -> None:
    predictions = tuple(
        change(p, lower_bound_s=p.iteration_s / 2) for p in bundle.comparison.predictions
    )
    comparison = change(bundle.comparison, predictions=predictions)
    names = [figure.name for figure in summarise(replace(bundle, comparison=comparison)).figures]
    assert "exposed" in names
    assert "above_bound" not in names


def test_planners_are_sorted_by_time_and_one_is_chosen(bundle: Bundle) -> None:
    rows = summarise(bundle).planners.rows
    times = [row.iteration_s for row in rows]
    assert times == sorted(times)
    assert [row.planner for row in rows if row.chosen] == ["merge"]


def test_checks_are_signed_relative_to_the_measurement(bundle: Bundle) -> None:
    checks = {check.what: check for check in summarise(bundle).checks}
    planned = checks["iteration, merge plan"]
    assert planned.error == pytest.approx(planned.predicted_s / planned.measured_s - 1)
    assert planned.noise_s == 0.0024
    assert checks["its exposed communication"].noise_s is None


def test_a_fit_error_that_was_not_recorded_is_computed() -> None:
    points = tuple(
        Measurement(size_bytes=size, time_s=time_s, repetitions=3)
        for size, time_s in ((10, 0.01), (20, 0.04), (0, 0.0))
    )
    network = Network.line(workers=2, a_s=0.0, b_s_per_byte=1e-3)
    facts = network_facts(change(network, points=points))
    assert facts.fit_error == pytest.approx(0.25)
    assert facts.fit_error_max == pytest.approx(0.5)
    assert facts.points[0].error is None


def test_a_training_that_diverged_has_results_that_are_no_numbers(bundle: Bundle) -> None:
    summary = summarise(replace(bundle, run=change(bundle.run, results={"loss": math.nan})))
    assert summary.figures[-1].value is None
    assert figure_text(summary.figures[-1]) == "NaN"
    assert Summary.from_json(summary.to_json()) == summary


def test_waiting_is_no_computing(overlapped: Bundle) -> None:
    measured = overlapped.timeline_measured
    assert min(measured.stall_ns(), measured.order_stall_ns()) > 0
    assert 0 < measured.link_share() < 1
    facts = timeline_facts(measured)
    # One worker on one lane: it computes, waits for messages, or nothing is known of it.
    assert facts.computation_s + facts.stall_s == pytest.approx(facts.iteration_s)
    assert facts.exposed_s == pytest.approx(facts.stall_s)


def test_stalls_are_predicted_and_measured(overlapped: Bundle) -> None:
    checks = {check.what: check for check in summarise(overlapped).checks}
    waiting = checks["its computation waiting for messages"]
    assert waiting.measured_s == overlapped.timeline_measured.stall_ns() / 1e9
    assert waiting.predicted_s > 0
    idle = checks["its link idle while a later message was ready"]
    assert idle.measured_s == overlapped.timeline_measured.order_stall_ns() / 1e9
    assert idle.error == pytest.approx(idle.predicted_s / idle.measured_s - 1)
