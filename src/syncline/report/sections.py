"""The sections of a page on one run: its results, and the inputs behind them."""

from __future__ import annotations

from syncline.report import units
from syncline.report.bundle import Bundle
from syncline.report.chart import fit_plot
from syncline.report.markup import (
    Column,
    Html,
    bar,
    legend,
    note,
    section,
    stacked_bar,
    table,
    tag,
    typeset,
)
from syncline.report.summary import NetworkFacts, PlannerRow, Summary
from syncline.report.verdict import figure_text

__all__ = [
    "checks_section",
    "events_section",
    "figures_section",
    "largest_section",
    "messages_section",
    "network_section",
    "planners_section",
    "profile_section",
]


def figures_section(_: Bundle, summary: Summary) -> Html | None:
    """Return the row of key figures."""
    if not summary.figures:
        return None
    return tag(
        "dl",
        [
            tag(
                "div",
                tag("dt", figure.label),
                tag("dd", typeset(figure_text(figure)), class_="value"),
                tag("dd", typeset(figure.note), class_="note") if figure.note else None,
            )
            for figure in summary.figures
        ],
        class_="figures",
    )


def planners_section(_: Bundle, summary: Summary) -> Html | None:
    """Return the table of the planners, fastest first."""
    planners = summary.planners
    if planners is None:
        return None
    rows = planners.rows
    longest_s = max((row.iteration_s for row in rows), default=0.0) or 1.0
    time = units.TimeUnit(row.iteration_s for row in rows)
    exposed = units.TimeUnit([0.0])
    columns = [
        Column(title="Planner"),
        Column(title="", wide=True, css="bar"),
        Column(title=f"Iteration, {time.name}", numeric=True),
        Column(title="Messages", numeric=True, wide=True),
        Column(title=f"Exposed, {exposed.name}", numeric=True),
        Column(title="of comm.", numeric=True, wide=True),
        Column(title="Above bound", numeric=True),
    ]
    cells = [
        (
            [row.planner, tag("span", " chosen", class_="chosen") if row.chosen else None],
            _planner_bar(row, longest_s),
            time.text(row.iteration_s),
            str(row.messages),
            f"{row.exposed_s * 1e3:.1f}",
            units.percent(row.exposed_fraction),
            units.percent(row.distance_to_bound),
        )
        for row in rows
    ]
    marked = next((index for index, row in enumerate(rows) if row.chosen), None)
    caption = f"Predictions for {planners.model} on {planners.workers} workers"
    return section(
        "planners",
        "What each planner would take",
        note(
            "Predicted for ",
            f"{planners.network}, {units.counted(planners.workers, 'worker')}. ",
            tag("span", class_="swatch k-backward"),
            " computing, ",
            tag("span", class_="swatch exposed"),
            " communication that nothing hides, ",
            tag("span", class_="swatch tick"),
            " the lower bound that no schedule can pass.",
        ),
        table(columns, cells, caption=caption, marked=marked),
        tag(
            "p",
            tag("b", f"Why {planners.chosen}: "),
            typeset(planners.reason.rstrip(". ") + "."),
            class_="why",
        ),
        tag("p", typeset(f"{planners.sharing}."), class_="why") if planners.sharing else "",
        tag("p", tag("b", "Compression: "), typeset(f"{planners.suggestion}."), class_="why")
        if planners.suggestion
        else "",
    )


def _planner_bar(row: PlannerRow, longest_s: float) -> Html:
    computing = min(row.computation_s, row.iteration_s) / longest_s
    whole = row.iteration_s / longest_s
    bound = row.lower_bound_s / longest_s
    return bar(
        (0, computing, "k-backward"),
        (computing, whole, "exposed"),
        (bound - 0.003, bound + 0.003, "tick"),
    )


def checks_section(_: Bundle, summary: Summary) -> Html | None:
    """Return the table of predicted and measured times."""
    checks = summary.checks
    if not checks:
        return None
    unit = units.TimeUnit(value for c in checks for value in (c.predicted_s, c.measured_s))
    columns = [
        Column(title="Quantity"),
        Column(title=f"Predicted, {unit.name}", numeric=True),
        Column(title=f"Measured, {unit.name}", numeric=True),
        Column(title=f"± noise, {unit.name}", numeric=True, wide=True),
        Column(title="Error", numeric=True),
    ]
    cells = [
        (
            check.what[0].upper() + check.what[1:],
            unit.text(check.predicted_s),
            unit.text(check.measured_s),
            "" if check.noise_s is None else unit.text(check.noise_s),
            "" if check.error is None else units.percent(check.error, signed=True),
        )
        for check in checks
    ]
    return section(
        "checks",
        "Predicted against measured",
        note(
            "A positive error means that the prediction was too slow. Values with noise are "
            "medians over many iterations."
        ),
        table(columns, cells, caption="Predicted and measured times"),
    )


MOST_MESSAGES = 24
"""Messages shown at once; the rest unfolds."""


def network_section(bundle: Bundle, summary: Summary) -> Html | None:
    """Return the fit of the network: its plot and its terms."""
    facts = summary.network
    if facts is None or bundle.network is None:
        return None
    plot = fit_plot(bundle.network)
    return section(
        "network",
        "The network",
        note(
            f"An all-reduce among {units.counted(facts.workers, 'worker')} of {facts.name}"
            f" ({facts.backend})",
            ": measured points and the fitted curve." if plot else ".",
        ),
        tag("div", plot, _network_terms(facts), class_="beside" if plot else None),
    )


def _network_terms(facts: NetworkFacts) -> Html:
    terms: list[tuple[str, str, str]] = [
        ("start", units.duration(facts.startup_s), "an all-reduce of no bytes, by the fit")
    ]
    if facts.alpha_s is not None:
        why = "before the first byte arrives, between two workers"
        terms.append(("\u03b1", units.duration(facts.alpha_s), why))
    if facts.beta_s_per_byte is not None:
        beta = facts.beta_s_per_byte
        speed = f", that is {units.rate(1 / beta)}" if beta > 0 else ""
        terms.append(
            ("\u03b2", units.byte_time(beta), f"each further byte between two workers{speed}")
        )
    if facts.gamma_s_per_byte is not None:
        why = "adding one byte of two arrays in memory"
        terms.append(("\u03b3", units.byte_time(facts.gamma_s_per_byte), why))
    if facts.fit_error is not None:
        why = "mean distance of the curve from the measured points"
        terms.append(("fit error", units.percent(facts.fit_error), why))
    if facts.fit_error_max is not None:
        why = "at the point that it fits worst"
        terms.append(("worst", units.percent(facts.fit_error_max), why))
    known = ", as fitted to measured iterations" if facts.contention.fitted else ""
    why = f"how many times slower computing runs while messages are under way{known}; 1: not at all"
    terms.append(("slowed computing", f"{facts.contention.computing:.2f}", why))
    why = f"how many times slower messages run while computing{known}; 1: not at all"
    terms.append(("slowed messages", f"{facts.contention.exchange:.2f}", why))
    if facts.contention.per_message_s:
        why = f"how much longer a worker computes for each message with deferred updates{known}"
        terms.append(("a message", units.duration(facts.contention.per_message_s), why))
    columns = [Column(title="Term"), Column(title="Value", numeric=True), Column(title="Meaning")]
    return table(columns, terms, caption="Terms of the network's cost")


def messages_section(_: Bundle, summary: Summary) -> Html | None:
    """Return the messages of the plan in the order in which they are sent."""
    messages = summary.messages
    if not messages:
        return None
    largest = max(message.size_bytes for message in messages) or 1
    columns = [
        Column(title="No.", numeric=True),
        Column(title="Tensors, in the order they become ready", css="name"),
        Column(title="", wide=True, css="bar"),
        Column(title="Size", numeric=True),
    ]
    cells = [
        (
            str(message.number),
            message.label,
            bar((0, message.size_bytes / largest, "k-message")),
            units.size(message.size_bytes),
        )
        for message in messages
    ]
    total = units.size(sum(message.size_bytes for message in messages))
    caption = "Messages of the plan in the order in which they are sent"
    rest = cells[MOST_MESSAGES:]
    return section(
        "messages",
        "The messages of the plan",
        note(typeset(f"{total} in {units.counted(len(messages), 'message')}.")),
        table(columns, cells[:MOST_MESSAGES], caption=caption),
        tag(
            "details",
            tag("summary", f"{len(rest)} more"),
            table(columns, rest, caption=f"{caption}, continued"),
        )
        if rest
        else None,
    )


def largest_section(_: Bundle, summary: Summary) -> Html | None:
    """Return the largest gradients and the longest operations."""
    profile = summary.profile
    if profile is None:
        return None
    gradients = table(
        [
            Column(title="Gradient", css="name"),
            Column(title="Size", numeric=True),
            Column(title="Share", numeric=True),
        ],
        [
            (g.name, units.size(g.size_bytes), units.percent(g.share))
            for g in profile.largest_gradients
        ],
        caption="The largest gradients, with their share of all gradient bytes",
    )
    operations = table(
        [
            Column(title="Operation", css="name"),
            Column(title="Phase", wide=True),
            Column(title="Time", numeric=True),
            Column(title="Share", numeric=True),
        ],
        [
            (o.name, o.phase, units.duration(o.duration_s), units.percent(o.share))
            for o in profile.largest_operations
        ],
        caption="The longest operations, with their share of the computing time",
    )
    return section(
        "largest",
        "The largest gradients and the longest operations",
        tag("div", tag("div", gradients), tag("div", operations), class_="beside"),
    )


def profile_section(_: Bundle, summary: Summary) -> Html | None:
    """Return what was profiled, and how an iteration's time divides into phases."""
    profile = summary.profile
    if profile is None:
        return None
    phases = profile.phases_s.items()
    parts = [(seconds, f"k-{phase}") for phase, seconds in phases]
    workers = units.counted(profile.workers, "worker")
    iterations = units.counted(profile.iterations, "iteration")
    operations = units.counted(profile.operations, "operation")
    gradients = units.counted(profile.gradients, "gradient")
    text = (
        f"{profile.model} on {profile.device}, {workers}, medians over {iterations}. One iteration "
        f"computes for {units.duration(profile.computation_s)} in {operations} and leaves "
        f"{gradients} of {units.size(profile.gradient_bytes)} to exchange."
    )
    return section(
        "profile",
        "What was profiled",
        tag("p", typeset(text)),
        tag("div", stacked_bar(parts, profile.computation_s or 1.0), class_="phases"),
        legend((f"k-{phase}", typeset(f"{phase} {units.duration(s)}")) for phase, s in phases),
    )


def events_section(_: Bundle, summary: Summary) -> Html | None:
    """Return what the run did, and when."""
    if summary.run is None or not summary.run.events:
        return None
    columns = [Column(title="Iteration", numeric=True), Column(title="What happened", css="text")]
    cells = [(str(event.iteration), typeset(event.text)) for event in summary.run.events]
    return section("events", "What the run did", table(columns, cells, caption="Events"))
