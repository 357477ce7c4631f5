"""``Summary``: the content of a report, computed once for the page, the JSON and the terminal."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

from syncline.model.document import Document
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

LARGEST = 10
"""How many of the largest gradients and operations a report lists."""


class Summary(Document, frozen=True):
    """The content of a report. Spans are not repeated: they stand in the timelines' own files."""

    KIND: ClassVar[str] = "report"
    VERSION: ClassVar[int] = 1

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
        run=RunFacts(
            model=run.model,
            workers=run.workers,
            backend=run.backend,
            machine=run.machine,
            decision=run.decision,
            reason=run.reason,
            planner=run.planner,
            messages=run.messages,
            deferred=run.deferred,
            rates=run.rates,
            results={name: number(value) for name, value in run.results.items()},
            events=run.events,
        )
        if run
        else None,
    )


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
    return PlannerTable(
        model=comparison.model,
        network=comparison.network,
        workers=comparison.workers,
        rows=tuple(
            PlannerRow(
                planner=p.planner,
                chosen=p.planner == comparison.chosen,
                iteration_s=p.iteration_s,
                messages=p.messages,
                computation_s=p.computation_s,
                communication_s=p.communication_s,
                exposed_s=p.exposed_s,
                exposed_fraction=p.exposed_fraction,
                lower_bound_s=p.lower_bound_s,
                distance_to_bound=p.distance_to_bound,
            )
            for p in fastest_first
        ),
        chosen=comparison.chosen,
        reason=comparison.reason,
        suggestion=comparison.suggestion.sentence if comparison.suggestion else "",
    )


def network_facts(network: Network) -> NetworkFacts:
    """Return what a network costs; the fit's error is taken from its points if not recorded."""
    points = []
    for point in sorted(network.points, key=lambda p: p.size_bytes):
        fitted_s = network.all_reduce.seconds(point.size_bytes)
        error = fitted_s / point.time_s - 1 if point.time_s > 0 else None
        points.append(
            FittedPoint(
                size_bytes=point.size_bytes,
                time_s=point.time_s,
                fitted_s=fitted_s,
                error=error,
            )
        )
    errors = [abs(p.error) for p in points if p.error is not None]
    mean, largest = network.fit_error, network.fit_error_max
    if errors:
        mean = math.fsum(errors) / len(errors) if mean is None else mean
        largest = max(errors) if largest is None else largest
    link = network.link
    return NetworkFacts(
        name=network.name,
        workers=network.workers,
        backend=network.backend,
        startup_s=network.all_reduce.startup_s,
        alpha_s=link.alpha_s if link else None,
        beta_s_per_byte=link.beta_s_per_byte if link else None,
        gamma_s_per_byte=link.gamma_s_per_byte if link else None,
        contention=network.contention,
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
    run = bundle.run
    if run and run.baseline and run.predicted_baseline_s is not None:
        rate = run.baseline
        checks.append(
            _check("iteration, stock DDP", run.predicted_baseline_s, rate.iteration_s, rate.noise_s)
        )
    if run and run.planned and run.predicted_planned_s is not None:
        rate = run.planned
        what = f"iteration, {rate.name} plan"
        checks.append(_check(what, run.predicted_planned_s, rate.iteration_s, rate.noise_s))
    if run and run.steady and run.predicted_s is not None:
        rate = run.steady
        what = f"iteration, {rate.name} in the long run"
        checks.append(_check(what, run.predicted_s, rate.iteration_s, rate.noise_s))
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
    facts = zip(itertools.count(1), plan.message_tensors(), plan.message_bytes(), strict=False)
    return tuple(
        MessageFacts(
            number=number,
            label=plan.label(tensors),
            tensors=tuple(plan.tensors[index].name for index in tensors),
            size_bytes=size_bytes,
        )
        for number, tensors, size_bytes in facts
    )


def _profile(profile: Profile) -> ProfileFacts:
    gradient_bytes = profile.gradient_bytes
    computation_s = profile.computation_s
    phases = dict.fromkeys(operation.phase for operation in profile.operations)
    gradients = sorted(profile.gradients, key=lambda g: -g.size_bytes)[:LARGEST]
    operations = sorted(profile.operations, key=lambda o: -o.duration_s)[:LARGEST]
    return ProfileFacts(
        model=profile.model,
        device=profile.device,
        workers=profile.workers,
        iterations=profile.iterations,
        operations=len(profile.operations),
        gradients=len(profile.gradients),
        gradient_bytes=gradient_bytes,
        computation_s=computation_s,
        phases_s={phase: profile.phase_s(phase) for phase in phases},
        largest_gradients=tuple(
            LargeGradient(
                name=g.name,
                elements=g.elements,
                dtype=g.dtype,
                size_bytes=g.size_bytes,
                share=g.size_bytes / gradient_bytes if gradient_bytes else 0.0,
            )
            for g in gradients
        ),
        largest_operations=tuple(
            LargeOperation(
                name=o.name,
                phase=o.phase,
                duration_s=o.duration_s,
                share=o.duration_s / computation_s if computation_s else 0.0,
            )
            for o in operations
        ),
    )
