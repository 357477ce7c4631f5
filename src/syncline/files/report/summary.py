"""``Summary``: the content of a report, computed once for the page, the JSON and the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import msgspec

from syncline.files.report.bundle import Bundle
from syncline.files.report.verdict import KeyFigure, Verdict, key_figures, number, verdict
from syncline.plan.document import Document, Value
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.prediction import Comparison
from syncline.plan.profile import Phase, Profile
from syncline.plan.run import Decision, Event, RankMemory, Rate, Run
from syncline.plan.timeline import NOT_COMPUTING, Timeline, active_ns, exposed_intervals, union

T = TypeVar("T", bound=Value)

LARGEST = 10  # how many of the largest gradients and operations a report lists


class TimelineFacts(Value, frozen=True):
    """Totals of one timeline, in seconds."""

    name: str
    source: str
    iteration_s: float
    computation_s: float  # while at least one operation runs
    communication_s: float  # while at least one message is in flight
    exposed_s: float  # while a message is in flight and nothing computes
    spans: int
    stall_s: float = 0.0  # while computation waits for messages, if the timeline records waits
    order_stall_s: float = 0.0  # the link idles; its next message is not ready, a later one is
    link_share: float = 0.0  # share of the iteration in which at least one message is in flight


class PlannerRow(Value, frozen=True):
    """One planner of the table, with what follows from its prediction."""

    planner: str
    chosen: bool
    iteration_s: float
    messages: int
    computation_s: float
    communication_s: float
    exposed_s: float
    lower_bound_s: float
    distance_to_bound: float
    interval_s: tuple[float, float] | None


class PlannerTable(Value, frozen=True):
    """The planners, fastest first."""

    model: str
    network: str
    workers: int
    rows: tuple[PlannerRow, ...]
    chosen: str
    reason: str
    suggestion: str = ""  # what sparse exchange would gain, in a sentence; empty if not predicted
    sharing: str = ""  # effect of jobs that share the links on the chosen plan; empty for one job


class Check(Value, frozen=True):
    """One quantity that was predicted and measured."""

    what: str
    predicted_s: float
    measured_s: float
    noise_s: float | None
    error: float | None  # predicted relative to measured, signed; None where 0 s were measured


class FittedPoint(Value, frozen=True):
    """A measured all-reduce, and its time by the fitted curve."""

    size_bytes: int
    time_s: float
    fitted_s: float
    error: float | None  # fitted relative to measured, signed; None for a point of 0 s


class NetworkFacts(Value, frozen=True):
    """What the network costs, and how well that is known."""

    name: str
    workers: int
    backend: str
    latency_s: float
    alpha_s: float | None
    beta_s_per_byte: float | None
    gamma_s_per_byte: float | None
    contention: Contention
    contention_by_need: Contention | None
    fit_error: float | None
    fit_error_max: float | None
    points: tuple[FittedPoint, ...]


class MessageFacts(Value, frozen=True):
    """One message of the plan."""

    number: int
    label: str
    tensors: tuple[str, ...]
    size_bytes: int


class LargeGradient(Value, frozen=True):
    """A gradient with its share of all gradient bytes."""

    name: str
    elements: int
    dtype: str
    size_bytes: int
    share: float


class LargeOperation(Value, frozen=True):
    """An operation with its share of the computing time."""

    name: str
    phase: Phase
    duration_s: float
    share: float


class ProfileFacts(Value, frozen=True):
    """What was profiled, and its totals."""

    model: str
    device: str
    workers: int
    iterations: int
    operations: int
    gradients: int
    gradient_bytes: int
    computation_s: float
    phases_s: dict[str, float]
    largest_gradients: tuple[LargeGradient, ...]
    largest_operations: tuple[LargeOperation, ...]


class PhaseFacts(Value, frozen=True):
    """When training was in a phase, and what that took."""

    name: str
    start: int
    iterations: int
    seconds: float
    cost_s: float | None
    """Its time minus that of as many final iterations; None for these, or if there are none."""


class RunFacts(Value, frozen=True):
    """What the run was, and what it decided and reached."""

    model: str
    workers: int
    backend: str
    machine: str
    decision: Decision
    reason: str
    planner: str
    messages: int
    deferred: bool
    rates: tuple[Rate, ...]
    results: dict[str, float | None]  # None where one is not a number
    events: tuple[Event, ...]
    final_s: float | None = None  # seconds of a final iteration, to which costs are relative
    phases: tuple[PhaseFacts, ...] = ()
    memory: tuple[RankMemory, ...] = ()


class Summary(Document, frozen=True):
    """The content of a report, without the spans, which the files of the timelines hold."""

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
    return Summary(
        verdict=verdict(bundle),
        figures=key_figures(bundle),
        timelines=tuple(timeline_facts(t) for t in bundle.timelines()),
        planners=planner_table(bundle.comparison) if bundle.comparison else None,
        checks=tuple(_checks(bundle)),
        network=network_facts(bundle.network) if bundle.network else None,
        messages=_messages(bundle.plan) if bundle.plan else (),
        profile=_profile(bundle.profile) if bundle.profile else None,
        run=_run(bundle.run) if bundle.run else None,
    )


def _run(run: Run) -> RunFacts:
    measured = run.measured if run.decision != "undecided" else None
    final_s = measured.iteration_s if measured else None
    phases = []
    for phase in run.phases:
        name, cost_s = phase.name, None
        if phase is run.phases[-1] and name == "steady":
            name = run.phase_text(name)
        elif name != "steady" and final_s is not None:
            cost_s = phase.seconds - phase.iterations * final_s
        phases.append(_facts(PhaseFacts, phase, name=name, cost_s=cost_s))
    results = {name: number(value) for name, value in run.results.items()}
    return _facts(RunFacts, run, results=results, final_s=final_s, phases=tuple(phases))


def _facts(kind: type[T], source: object, **others: Any) -> T:
    """Return facts whose fields are the attributes of ``source``, except ``others``."""
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
        computation_s=active_ns(computing) / 1e9,
        communication_s=active_ns(communicating) / 1e9,
        exposed_s=active_ns(exposed_intervals(timeline)) / 1e9,
        stall_s=timeline.stall_ns() / 1e9,
        order_stall_s=timeline.order_stall_ns() / 1e9,
        link_share=timeline.link_share(),
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
        error = _error(fitted_s, point.time_s)
        points.append(FittedPoint(point.size_bytes, point.time_s, fitted_s, error))
    errors = [abs(p.error) for p in points if p.error is not None]
    mean, largest = network.fit_error, network.fit_error_max
    if errors:
        mean = math.fsum(errors) / len(errors) if mean is None else mean
        largest = max(errors) if largest is None else largest
    link = network.link
    return _facts(
        NetworkFacts,
        network,
        latency_s=network.all_reduce.latency_s,
        alpha_s=link.alpha_s if link else None,
        beta_s_per_byte=link.beta_s_per_byte if link else None,
        gamma_s_per_byte=link.gamma_s_per_byte if link else None,
        fit_error=mean,
        fit_error_max=largest,
        points=tuple(points),
    )


def _error(predicted_s: float, measured_s: float) -> float | None:
    return predicted_s / measured_s - 1 if measured_s > 0 else None


def _checks(bundle: Bundle) -> Iterator[Check]:
    def check(what: str, predicted_s: float, measured_s: float, noise_s: float | None) -> Check:
        return Check(what, predicted_s, measured_s, noise_s, _error(predicted_s, measured_s))

    if run := bundle.run:
        for what, predicted_s, rate in (
            ("iteration, DDP", run.predicted_baseline_s, run.baseline),
            ("iteration, {} plan", run.predicted_planned_s, run.planned),
            ("iteration, {} in the long run", run.predicted_s, run.steady),
        ):
            if rate and predicted_s is not None:
                yield check(what.format(rate.name), predicted_s, rate.iteration_s, rate.noise_s)
    if bundle.timeline_predicted and bundle.timeline_measured:
        both = (bundle.timeline_predicted, bundle.timeline_measured)
        shown = [
            ("the iteration drawn above", "iteration_s"),
            ("its computation", "computation_s"),
            ("its communication", "communication_s"),
            ("its exposed communication", "exposed_s"),
        ]
        if all(timeline.records_waits for timeline in both):
            shown += [
                ("its computation waiting for messages", "stall_s"),
                ("its link idle while a later message was ready", "order_stall_s"),
            ]
        predicted, measured = map(timeline_facts, both)
        for what, field in shown:
            yield check(what, getattr(predicted, field), getattr(measured, field), None)


def _messages(plan: Plan) -> tuple[MessageFacts, ...]:
    messages = zip(plan.message_tensors(), plan.message_bytes(), strict=True)
    return tuple(
        MessageFacts(
            number=number,
            label=plan.label(tensors),
            tensors=tuple(plan.tensors[index].name for index in tensors),
            size_bytes=size_bytes,
        )
        for number, (tensors, size_bytes) in enumerate(messages, start=1)
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
