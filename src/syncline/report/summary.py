"""``Summary``: the content of a report, computed once for the page, the JSON and the terminal."""

from __future__ import annotations

import math
from typing import Any, ClassVar, TypeVar

import msgspec

from syncline.model.document import Document, Value
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.prediction import Comparison
from syncline.model.profile import Profile
from syncline.model.timeline import NOT_COMPUTING, Timeline, busy_ns, exposed_intervals, union
from syncline.report.bundle import Bundle
from syncline.report.facts import (
    Check,
    FittedPoint,
    LargeGradient,
    LargeOperation,
    MessageFacts,
    NetworkFacts,
    PlannerRow,
    PlannerTable,
    ProfileFacts,
    RunFacts,
    TimelineFacts,
    number,
)
from syncline.report.verdict import KeyFigure, Verdict, key_figures, verdict

__all__ = ["Summary", "network_facts", "planner_table", "summarise", "timeline_facts"]

T = TypeVar("T", bound=Value)

LARGEST = 10
"""How many of the largest gradients and operations a report lists."""


class Summary(Document, frozen=True):
    """The content of a report. Spans are not repeated: they stand in the timelines' own files."""

    KIND: ClassVar[str] = "report"
    VERSION: ClassVar[int] = 2

    verdict: Verdict
    figures: tuple[KeyFigure, ...] = ()
    timelines: tuple[TimelineFacts, ...] = ()
    planners: PlannerTable | None = None
    checks: tuple[Check, ...] = ()
    network: NetworkFacts | None = None
    messages: tuple[MessageFacts, ...] = ()
    profile: ProfileFacts | None = None
    run: RunFacts | None = None


def summarise(bundle: Bundle) -> Summary:
    """Return what a report on ``bundle`` says; what the bundle lacks is left out."""
    run = bundle.run
    return Summary(
        verdict=verdict(bundle),
        figures=key_figures(bundle),
        timelines=tuple(timeline_facts(t) for t in bundle.timelines()),
        planners=planner_table(bundle.comparison) if bundle.comparison else None,
        checks=_checks(bundle),
        network=network_facts(bundle.network) if bundle.network else None,
        messages=_messages(bundle.plan) if bundle.plan else (),
        profile=_profile(bundle.profile) if bundle.profile else None,
        run=_facts(RunFacts, run, results={n: number(v) for n, v in run.results.items()})
        if run
        else None,
    )


def _facts(kind: type[T], source: object, **others: Any) -> T:
    """Return facts whose fields are the attributes of ``source``, but for ``others``."""
    names = (field.name for field in msgspec.structs.fields(kind) if field.name not in others)
    return kind(**{name: getattr(source, name) for name in names}, **others)


def timeline_facts(timeline: Timeline) -> TimelineFacts:
    """Return the totals of a timeline."""
    computing = union(s for s in timeline.spans if s.kind not in NOT_COMPUTING)
    communicating = union(s for s in timeline.spans if s.kind == "message")
    return TimelineFacts(
        name=timeline.name,
        source=timeline.source,
        iteration_s=timeline.iteration_ns / 1e9,
        computation_s=busy_ns(computing) / 1e9,
        communication_s=busy_ns(communicating) / 1e9,
        exposed_s=busy_ns(exposed_intervals(timeline)) / 1e9,
        stall_s=timeline.stall_ns() / 1e9,
        order_stall_s=timeline.order_stall_ns() / 1e9,
        line_share=timeline.line_share(),
        spans=len(timeline.spans),
    )


def planner_table(comparison: Comparison) -> PlannerTable:
    """Return the planners of a comparison, fastest first."""
    fastest_first = sorted(comparison.predictions, key=lambda p: (p.iteration_s, p.planner))
    return _facts(
        PlannerTable,
        comparison,
        rows=tuple(
            _facts(PlannerRow, p, chosen=p.planner == comparison.chosen) for p in fastest_first
        ),
        suggestion=comparison.suggestion.sentence if comparison.suggestion else "",
        sharing=comparison.of(comparison.chosen).sharing_sentence,
    )


def network_facts(network: Network) -> NetworkFacts:
    """Return what a network costs; the fit's error is taken from its points if not recorded."""
    points = []
    for point in sorted(network.points, key=lambda p: p.size_bytes):
        fitted_s = network.all_reduce.seconds(point.size_bytes)
        error = fitted_s / point.time_s - 1 if point.time_s > 0 else None
        points.append(_facts(FittedPoint, point, fitted_s=fitted_s, error=error))
    errors = [abs(p.error) for p in points if p.error is not None]
    mean, largest = network.fit_error, network.fit_error_max
    if errors:
        mean = math.fsum(errors) / len(errors) if mean is None else mean
        largest = max(errors) if largest is None else largest
    link = network.link
    return _facts(
        NetworkFacts,
        network,
        startup_s=network.all_reduce.startup_s,
        alpha_s=link.alpha_s if link else None,
        beta_s_per_byte=link.beta_s_per_byte if link else None,
        gamma_s_per_byte=link.gamma_s_per_byte if link else None,
        fit_error=mean,
        fit_error_max=largest,
        points=tuple(points),
    )


def _check(what: str, predicted_s: float, measured_s: float, noise_s: float | None) -> Check:
    error = predicted_s / measured_s - 1 if measured_s > 0 else None
    return Check(
        what=what, predicted_s=predicted_s, measured_s=measured_s, noise_s=noise_s, error=error
    )


def _checks(bundle: Bundle) -> tuple[Check, ...]:
    checks = []
    if run := bundle.run:
        for what, predicted_s, rate in (
            ("iteration, stock DDP", run.predicted_baseline_s, run.baseline),
            ("iteration, {} plan", run.predicted_planned_s, run.planned),
            ("iteration, {} in the long run", run.predicted_s, run.steady),
        ):
            if rate and predicted_s is not None:
                what = what.format(rate.name)
                checks.append(_check(what, predicted_s, rate.iteration_s, rate.noise_s))
    if bundle.timeline_predicted and bundle.timeline_measured:
        predicted = timeline_facts(bundle.timeline_predicted)
        measured = timeline_facts(bundle.timeline_measured)
        shown = [
            ("the iteration drawn above", "iteration_s"),
            ("its computation", "computation_s"),
            ("its communication", "communication_s"),
            ("its exposed communication", "exposed_s"),
        ]
        if bundle.timeline_predicted.records_waits and bundle.timeline_measured.records_waits:
            shown += [
                ("its computation waiting for messages", "stall_s"),
                ("its line idle while a later message was ready", "order_stall_s"),
            ]
        for what, field in shown:
            checks.append(_check(what, getattr(predicted, field), getattr(measured, field), None))
    return tuple(checks)


def _messages(plan: Plan) -> tuple[MessageFacts, ...]:
    return tuple(
        MessageFacts(
            number=number,
            label=plan.label(tensors),
            tensors=tuple(plan.tensors[index].name for index in tensors),
            size_bytes=size_bytes,
        )
        for number, (tensors, size_bytes) in enumerate(
            zip(plan.message_tensors(), plan.message_bytes(), strict=True), start=1
        )
    )


def _profile(profile: Profile) -> ProfileFacts:
    gradient_bytes, computation_s = profile.gradient_bytes, profile.computation_s
    phases = dict.fromkeys(operation.phase for operation in profile.operations)
    gradients = sorted(profile.gradients, key=lambda g: -g.size_bytes)[:LARGEST]
    operations = sorted(profile.operations, key=lambda o: -o.duration_s)[:LARGEST]
    return _facts(
        ProfileFacts,
        profile,
        operations=len(profile.operations),
        gradients=len(profile.gradients),
        phases_s={phase: profile.phase_s(phase) for phase in phases},
        largest_gradients=tuple(
            _facts(LargeGradient, g, share=g.size_bytes / gradient_bytes if gradient_bytes else 0.0)
            for g in gradients
        ),
        largest_operations=tuple(
            _facts(LargeOperation, o, share=o.duration_s / computation_s if computation_s else 0.0)
            for o in operations
        ),
    )
