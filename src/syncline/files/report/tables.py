"""Our files as short tables for a terminal. Names are shown as they are: no markup is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from syncline.files.report import summary, terminal, units
from syncline.files.report.markup import Column
from syncline.files.report.verdict import figure_text
from syncline.plan.document import Document
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.prediction import Comparison
from syncline.plan.profile import Gradient, Profile
from syncline.plan.run import Event, Run
from syncline.plan.timeline import Row, Span, Timeline, rows

LIMIT = 12  # rows of tables that could be long, so that a file takes no more than a screen
MOST_POINTS = 20
MOST_MESSAGES = 25
error = partial(units.percent, signed=True)
BAR_COLUMNS = 56
SHADES = " ░▒▓█"


def comparison_table(comparison: Comparison) -> RenderableType:
    """Return the planners with their predicted times, fastest first, the chosen one marked."""
    planners = summary.planner_table(comparison)
    time = units.TimeUnit(row.iteration_s for row in planners.rows)
    columns: list[Column[summary.PlannerRow]] = [
        Column("", lambda row: "*" if row.chosen else ""),
        Column("planner", lambda row: row.planner),
        Column(f"iteration, {time.name}", lambda row: time.text(row.iteration_s), numeric=True),
        Column("90 %\ninterval", lambda row: time.between(row.interval_s), numeric=True),
        Column("messages", lambda row: str(row.messages), numeric=True),
        Column("exposed, ms", lambda row: f"{row.exposed_s * 1e3:.1f}", numeric=True),
        Column("above bound", lambda row: error(row.distance_to_bound), numeric=True),
    ]
    marked = next((index for index, row in enumerate(planners.rows) if row.chosen), None)
    bounds = {units.duration(row.lower_bound_s) for row in planners.rows}
    bound = f"; no schedule can be below {bounds.pop()}" if len(bounds) == 1 else ""
    workers = units.counted(planners.workers, "worker")
    where = f"{planners.model} on {planners.network}, {workers}{bound}"
    suggestion = f"compression: {planners.suggestion}" if planners.suggestion else ""
    return Group(
        terminal.title(where),
        terminal.below(terminal.table(columns, planners.rows, marked=marked)),
        terminal.below(terminal.text(f"* {planners.chosen}: {planners.reason}")),
        *map(terminal.text, filter(None, (planners.sharing, suggestion))),
    )


def profile_table(profile: Profile) -> RenderableType:
    """Return what was profiled, the time of each phase and the largest gradients."""
    phases = dict.fromkeys(operation.phase for operation in profile.operations)
    pairs = [
        ("device", profile.device),
        ("workers", str(profile.workers)),
        ("iterations", str(profile.iterations)),
        ("operations", str(len(profile.operations))),
        ("gradients", f"{len(profile.gradients)}, {units.size(profile.gradient_bytes)}"),
        ("computation", units.duration(profile.computation_s)),
        *((f"  {phase}", units.duration(profile.phase_s(phase))) for phase in phases),
    ]
    if baseline := profile.baseline:
        took = units.with_noise(baseline.iteration_s, baseline.noise_s)
        count = units.counted(baseline.iterations, "iteration")
        pairs.append(("DDP", f"{took} over {count}"))
    ready_s = profile.ready_s()
    by_size = sorted(zip(profile.gradients, ready_s, strict=True), key=lambda g: -g[0].size_bytes)
    columns: list[Column[tuple[Gradient, float]]] = [
        Column("largest gradients", lambda row: row[0].name),
        Column("size", lambda row: units.size(row[0].size_bytes), numeric=True),
        Column("dtype", lambda row: row[0].dtype, numeric=True),
        Column("ready at", lambda row: units.duration(row[1]), numeric=True),
    ]
    return Group(
        terminal.title(f"Profile of {profile.model}"),
        terminal.facts(pairs),
        terminal.below(terminal.table(columns, by_size[:LIMIT])),
        *terminal.left_out(len(profile.gradients) - LIMIT, "gradient"),
    )


def network_table(network: Network) -> RenderableType:
    """Return the terms of the cost, and the measured points beside the fitted curve."""
    facts = summary.network_facts(network)
    pairs = [
        ("workers", str(facts.workers)),
        ("backend", facts.backend),
        ("latency", f"{units.duration(facts.latency_s)}, an all-reduce of no bytes"),
    ]
    if link := network.link:
        beta = link.beta_s_per_byte
        speed = f", {units.rate(1 / beta)}" if beta > 0 else ""
        pairs += [
            ("alpha", f"{units.duration(link.alpha_s)} before the first byte arrives"),
            ("beta", f"{units.byte_time(beta)} between two workers{speed}"),
            ("gamma", f"{units.byte_time(link.gamma_s_per_byte)} to add two arrays"),
        ]
    if facts.fit_error is not None and facts.fit_error_max is not None:
        worst = units.percent(facts.fit_error_max)
        pairs.append(("fit error", f"{units.percent(facts.fit_error)} mean, {worst} at worst"))
    for name, contention in (
        ("contention, reducer" if facts.contention_by_need else "contention", facts.contention),
        ("contention, engine", facts.contention_by_need),
    ):
        if contention is None:
            continue
        text = (
            f"computing {contention.computing:.2f} and messages {contention.exchange:.2f} times "
            "slower at once"
        )
        if contention.per_message_s:
            text += f", {units.duration(contention.per_message_s)} of computing a message"
        if contention.fitted:
            text += ", fitted to measured iterations"
        pairs.append((name, text))
    columns: list[Column[summary.FittedPoint]] = [
        Column("size", lambda point: units.size(point.size_bytes), numeric=True),
        Column("measured", lambda point: units.duration(point.time_s), numeric=True),
        Column("fitted", lambda point: units.duration(point.fitted_s), numeric=True),
        Column("error", lambda point: error(point.error), numeric=True),
    ]
    points = terminal.below(terminal.table(columns, facts.points[:MOST_POINTS]))
    return Group(
        terminal.title(f"Network {network.name}"),
        terminal.facts(pairs),
        *([points] if facts.points else ()),
        *terminal.left_out(len(facts.points) - MOST_POINTS, "point"),
    )


def plan_table(plan: Plan) -> RenderableType:
    """Return the messages in the order in which they are sent."""
    sizes = plan.message_bytes()
    tensors = plan.message_tensors()
    columns: list[Column[int]] = [
        Column("", lambda index: str(index + 1), numeric=True),
        Column("tensors", lambda index: plan.label(tensors[index])),
        Column("size", lambda index: units.size(sizes[index]), numeric=True),
    ]
    return Group(
        terminal.title(
            f"Plan {plan.planner} for {plan.model}, {units.counted(plan.workers, 'worker')}"
        ),
        Text(
            f"{units.counted(len(plan.tensors), 'gradient')}, {units.size(sum(sizes))} in "
            f"{units.counted(len(sizes), 'message')}"
        ),
        terminal.below(terminal.table(columns, range(len(sizes))[:MOST_MESSAGES])),
        *terminal.left_out(len(sizes) - MOST_MESSAGES, "message"),
    )


def timeline_table(timeline: Timeline) -> RenderableType:
    """Return the lanes drawn in characters, the totals and the longest spans."""
    facts = summary.timeline_facts(timeline)
    end_ns = max([timeline.iteration_ns, *(span.stop_ns for span in timeline.spans)])
    picture = terminal.facts((row.name, f"│{_shaded(row, end_ns)}│") for row in rows(timeline))
    longest = sorted(timeline.spans, key=lambda s: s.start_ns - s.stop_ns)
    columns: list[Column[Span]] = [
        Column("longest spans", lambda span: span.label),
        Column("kind", lambda span: span.kind, numeric=True),
        Column("start", lambda span: units.duration(span.start_ns / 1e9), numeric=True),
        Column("duration", lambda s: units.duration((s.stop_ns - s.start_ns) / 1e9), numeric=True),
        Column("size", lambda span: units.size(span.size_bytes), numeric=True),
    ]
    totals = [
        f"iteration {units.duration(facts.iteration_s)}, computing "
        f"{units.duration(facts.computation_s)}, communicating "
        f"{units.duration(facts.communication_s)}, of which exposed "
        f"{units.duration(facts.exposed_s)}"
    ]
    if timeline.records_waits:
        totals.append(
            f"waiting for messages {units.duration(facts.stall_s)}, link busy "
            f"{units.percent(facts.link_share)}, idle while a later message was ready "
            f"{units.duration(facts.order_stall_s)}"
        )
    return Group(
        terminal.title(f"Timeline {timeline.name}, {timeline.source}"),
        *map(Text, totals),
        terminal.below(picture),
        terminal.below(terminal.table(columns, longest[:LIMIT])),
        *terminal.left_out(len(longest) - LIMIT, "span"),
    )


def _shaded(row: Row, end_ns: int) -> str:
    """Return the row as characters, each as dark as the share of its time that is busy."""
    busy = [0.0] * BAR_COLUMNS
    scale = BAR_COLUMNS / max(end_ns, 1)
    for span in row.spans:
        start, stop = span.start_ns * scale, span.stop_ns * scale
        for column in range(int(start), min(int(stop) + 1, BAR_COLUMNS)):
            busy[column] += max(min(stop, column + 1) - max(start, column), 0.0)
    # Rounded up, so that a short span still shows.
    return "".join(SHADES[min(-int(-share * 4 // 1), 4)] for share in busy)


def run_table(run: Run) -> RenderableType:
    """Return what the run measured, decided and reached."""
    pairs = [
        ("model", f"{run.model}, {units.counted(run.workers, 'worker')}, {run.backend}"),
        ("machine", run.machine),
        ("decision", f"{run.decision}: {run.reason}"),
        (
            "plan",
            f"{run.planner}, {units.counted(run.messages, 'message')}"
            + (", updates in the next forward pass" if run.deferred else ""),
        ),
    ]
    for name, rate, predicted_s in (
        ("DDP", run.baseline, run.predicted_baseline_s),
        ("Syncline", run.planned, run.predicted_planned_s),
        ("in the end", run.steady, run.predicted_s if run.steady else None),
    ):
        if rate is None and predicted_s is None:
            continue
        text = "not measured"
        if rate is not None:
            text = f"{units.with_noise(rate.iteration_s, rate.noise_s)} an iteration"
        text += f", predicted {units.duration(predicted_s, 4)}" if predicted_s else ""
        pairs.append((name, text))
    if run.prediction_error is not None:
        pairs.append(("prediction", f"{error(run.prediction_error)} off"))
    if run.overhead_iterations is not None:
        pairs.append(("overhead", f"{units.plain(run.overhead_iterations)} iterations of DDP"))
    for rate in run.rates:
        speed = f", {units.plain(rate.samples_per_s)} samples/s" if rate.samples_per_s else ""
        took = units.with_noise(rate.iteration_s, rate.noise_s)
        count = units.counted(rate.iterations, "iteration")
        pairs.append((f"{rate.name}, whole run", f"{took} over {count}{speed}"))
    pairs += [(name, units.plain(value)) for name, value in run.results.items()]
    columns: list[Column[Event]] = [
        Column("iteration", lambda event: str(event.iteration), numeric=True),
        Column("event", lambda event: event.text),
    ]
    events = terminal.below(terminal.table(columns, run.events[-LIMIT:]))
    return Group(
        terminal.title(f"Run of {run.model}"),
        terminal.facts(pairs),
        *([events] if run.events else ()),
        *terminal.left_out(len(run.events) - LIMIT, "earlier event"),
    )


def summary_table(report: summary.Summary) -> RenderableType:
    """Return the verdict of a report and its key figures."""
    figures = terminal.facts((figure.label, figure_text(figure)) for figure in report.figures)
    return Group(terminal.title(report.verdict.sentence), terminal.below(figures))


TABLES: dict[type[Document], Callable[[Any], RenderableType]] = {
    Comparison: comparison_table,
    Network: network_table,
    Plan: plan_table,
    Profile: profile_table,
    Run: run_table,
    summary.Summary: summary_table,
    Timeline: timeline_table,
}


def document_table(document: Document) -> RenderableType:
    """Return the table of one of our documents, by its type."""
    return TABLES[type(document)](document)
