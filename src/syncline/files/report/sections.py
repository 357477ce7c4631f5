"""The sections of a page on one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from syncline.files.report import summary, units
from syncline.files.report.chart import fit_plot
from syncline.files.report.markup import (
    Column,
    Html,
    bar,
    folded,
    legend,
    note,
    section,
    stacked_bar,
    table,
    tag,
    typeset,
)
from syncline.files.report.verdict import KeyFigure, figure_text
from syncline.plan.network import Network
from syncline.plan.run import Event, RankMemory


def figures_section(figures: Sequence[KeyFigure]) -> Html:
    """Return the row of key figures."""
    shown = [
        tag(
            "div",
            tag("dt", figure.label),
            tag("dd", typeset(figure_text(figure)), class_="value"),
            tag("dd", typeset(figure.note), class_="note") if figure.note else None,
        )
        for figure in figures
    ]
    return tag("dl", shown, class_="figures")


def planners_section(planners: summary.PlannerTable) -> Html:
    """Return the table of the planners, fastest first."""
    longest_s = max(row.iteration_s for row in planners.rows) or 1.0
    time = units.TimeUnit(row.iteration_s for row in planners.rows)
    chosen = tag("span", " chosen", class_="chosen")
    columns: list[Column[summary.PlannerRow]] = [
        Column("Planner", lambda row: [row.planner, chosen if row.chosen else None]),
        Column("", lambda row: _planner_bar(row, longest_s), wide=True, css="bar"),
        Column(f"Iteration, {time.name}", lambda row: time.text(row.iteration_s), numeric=True),
        Column("90 % interval", lambda r: time.between(r.interval_s), numeric=True, wide=True),
        Column("Messages", lambda row: str(row.messages), numeric=True, wide=True),
        Column("Added, ms", lambda row: f"{row.exposed_s * 1e3:.1f}", numeric=True),
        Column("Above bound", lambda row: units.percent(row.distance_to_bound), numeric=True),
    ]
    marked = next((index for index, row in enumerate(planners.rows) if row.chosen), None)
    caption = f"Predictions for {planners.model} on {planners.workers} workers"
    return section(
        "planners",
        "Predicted iteration of each planner",
        note(
            f"Predicted for {planners.network}, {units.counted(planners.workers, 'worker')}. ",
            tag("span", class_="swatch k-backward"),
            " computing alone, ",
            tag("span", class_="swatch exposed"),
            " what messages add to it, ",
            tag("span", class_="swatch tick"),
            " the lower bound: no schedule can be faster.",
        ),
        table(columns, planners.rows, caption=caption, marked=marked),
        [
            tag("p", tag("b", label) if label else None, typeset(f"{text}."), class_="why")
            for label, text in (
                (f"Why {planners.chosen}: ", planners.reason.rstrip(". ")),
                ("", planners.sharing),
                ("Compression: ", planners.suggestion),
            )
            if text
        ],
    )


def _planner_bar(row: summary.PlannerRow, longest_s: float) -> Html:
    computing = min(row.computation_s, row.iteration_s) / longest_s
    whole = row.iteration_s / longest_s
    bound = row.lower_bound_s / longest_s
    return bar(
        (0, computing, "k-backward"),
        (computing, whole, "exposed"),
        (bound - 0.003, bound + 0.003, "tick"),
    )


def checks_section(checks: Sequence[summary.Check]) -> Html:
    """Return the table of predicted and measured times."""
    unit = units.TimeUnit(value for c in checks for value in (c.predicted_s, c.measured_s))

    def text(seconds: float | None) -> str:
        return "" if seconds is None else unit.text(seconds)

    columns: list[Column[summary.Check]] = [
        Column("Quantity", lambda check: check.what[0].upper() + check.what[1:]),
        Column(f"Predicted, {unit.name}", lambda check: text(check.predicted_s), numeric=True),
        Column(f"Measured, {unit.name}", lambda check: text(check.measured_s), numeric=True),
        Column(f"± noise, {unit.name}", lambda c: text(c.noise_s), numeric=True, wide=True),
        Column("Error", lambda check: units.percent(check.error, signed=True), numeric=True),
    ]
    return section(
        "checks",
        "Predicted against measured",
        note(
            "A positive error means that the prediction was too slow. Values with noise are "
            "medians over many iterations."
        ),
        table(columns, checks, caption="Predicted and measured times"),
    )


def network_section(network: Network) -> Html:
    """Return the fit of the network: its plot and its terms."""
    plot = fit_plot(network)
    return section(
        "network",
        "The network",
        note(
            f"An all-reduce among {units.counted(network.workers, 'worker')} of {network.name}"
            f" ({network.backend})",
            ": measured points and the fitted curve." if plot else ".",
        ),
        tag("div", plot, _network_terms(network), class_="beside" if plot else None),
    )


def _network_terms(network: Network) -> Html:
    facts = summary.network_facts(network)
    terms: list[tuple[str, str, str]] = []

    def add(name: str, value: float | None, text: Callable[[float], str], why: str) -> None:
        if value is not None:
            terms.append((name, text(value), why))

    beta = facts.beta_s_per_byte
    speed = f", that is {units.rate(1 / beta)}" if beta else ""
    add("start", facts.latency_s, units.duration, "an all-reduce of no bytes, by the fit")
    why = "before the first byte arrives, between two workers"
    add("\u03b1", facts.alpha_s, units.duration, why)
    add("\u03b2", beta, units.byte_time, f"each further byte between two workers{speed}")
    why = "adding one byte of two arrays in memory"
    add("\u03b3", facts.gamma_s_per_byte, units.byte_time, why)
    why = "mean distance of the curve from the measured points"
    add("fit error", facts.fit_error, units.percent, why)
    add("worst", facts.fit_error_max, units.percent, "at the point that it fits worst")
    both = facts.contention_by_need is not None
    for contention, whose in (
        (facts.contention, ", DDP's reducer" if both else ""),
        (facts.contention_by_need, ", Syncline's engine"),
    ):
        if contention is None:
            continue
        where = ", as fitted to measured iterations" if contention.fitted else ""
        why = f"how many times slower computing runs while messages are in flight{where}"
        computing, exchange = f"slowed computing{whose}", f"slowed messages{whose}"
        add(computing, contention.computing, "{:.2f}".format, f"{why}; 1: not at all")
        why = f"how many times slower messages run while computing{where}"
        add(exchange, contention.exchange, "{:.2f}".format, f"{why}; 1: not at all")
        why = f"how much longer a worker computes for each message{where}"
        add(f"a message{whose}", contention.per_message_s or None, units.duration, why)
    columns: list[Column[tuple[str, str, str]]] = [
        Column("Term", lambda term: term[0]),
        Column("Value", lambda term: term[1], numeric=True),
        Column("Meaning", lambda term: term[2]),
    ]
    return table(columns, terms, caption="Terms of the network's cost")


MOST_MESSAGES = 24  # messages shown at once; the rest unfolds


def messages_section(messages: Sequence[summary.MessageFacts]) -> Html:
    """Return the messages of the plan in the order in which they are sent."""
    largest = max(message.size_bytes for message in messages) or 1
    columns: list[Column[summary.MessageFacts]] = [
        Column("No.", lambda message: str(message.number), numeric=True),
        Column("Tensors, in the order they become ready", lambda m: m.label, css="name"),
        Column("", lambda m: bar((0, m.size_bytes / largest, "k-message")), wide=True, css="bar"),
        Column("Size", lambda message: units.size(message.size_bytes), numeric=True),
    ]
    total = units.size(sum(message.size_bytes for message in messages))
    caption = "Messages of the plan in the order in which they are sent"
    rest = messages[MOST_MESSAGES:]
    return section(
        "messages",
        "The messages of the plan",
        note(typeset(f"{total} in {units.counted(len(messages), 'message')}.")),
        table(columns, messages[:MOST_MESSAGES], caption=caption),
        folded(f"{len(rest)} more", table(columns, rest, caption=f"{caption}, continued"))
        if rest
        else None,
    )


def largest_section(profile: summary.ProfileFacts) -> Html:
    """Return the largest gradients and the longest operations."""
    gradients: list[Column[summary.LargeGradient]] = [
        Column("Gradient", lambda gradient: gradient.name, css="name"),
        Column("Size", lambda gradient: units.size(gradient.size_bytes), numeric=True),
        Column("Share", lambda gradient: units.percent(gradient.share), numeric=True),
    ]
    operations: list[Column[summary.LargeOperation]] = [
        Column("Operation", lambda operation: operation.name, css="name"),
        Column("Phase", lambda operation: operation.phase, wide=True),
        Column("Time", lambda operation: units.duration(operation.duration_s), numeric=True),
        Column("Share", lambda operation: units.percent(operation.share), numeric=True),
    ]
    of_gradients = "The largest gradients, with their share of all gradient bytes"
    of_operations = "The longest operations, with their share of the computing time"
    return section(
        "largest",
        "The largest gradients and the longest operations",
        tag(
            "div",
            tag("div", table(gradients, profile.largest_gradients, caption=of_gradients)),
            tag("div", table(operations, profile.largest_operations, caption=of_operations)),
            class_="beside",
        ),
    )


def profile_section(profile: summary.ProfileFacts) -> Html:
    """Return what was profiled, and how an iteration's time divides into phases."""
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


LONGEST_SHARE = 0.5  # longest drawn width of the final iterations, as a share of all phases before


def phases_section(run: summary.RunFacts) -> Html | None:
    """Return when each phase of the training ran, and what it cost; None without phases."""
    if not run.phases:
        return None
    costs_s = [phase.cost_s for phase in run.phases if phase.cost_s is not None]
    counted = [phase for phase in run.phases if phase.cost_s is not None] or run.phases
    time = units.TimeUnit(phase.seconds for phase in counted)
    longest_s = LONGEST_SHARE * math.fsum(phase.seconds for phase in counted)
    columns: list[Column[tuple[int, summary.PhaseFacts]]] = [
        Column("No.", lambda row: str(row[0]), numeric=True),
        Column("Phase", lambda row: row[1].name, css="text"),
        Column("Iterations", lambda row: _iterations(row[1]), numeric=True),
        Column(f"Time, {time.name}", lambda row: time.text(row[1].seconds), numeric=True),
    ]
    about = (
        "Drawn to scale by time; the shortest phases are widened, and a long last one fades out."
    )
    final_s = run.final_s
    if final_s is not None and costs_s:

        def text(cost_s: float | None) -> str:
            return "" if cost_s is None else f"{time.text(cost_s)} ({cost_s / final_s:.1f})"

        columns.append(
            Column(f"Cost, {time.name} (iterations)", lambda row: text(row[1].cost_s), numeric=True)
        )
        cost_s = math.fsum(costs_s)
        about += (
            " The cost of a phase is its time beyond that of as many final iterations "
            f"({units.duration(final_s)} each): {units.duration(cost_s)} in all, "
            f"{cost_s / final_s:.1f} iterations' worth. The very first iterations, slow under any "
            "wrapper, are in no phase."
        )
    rows = list(enumerate(run.phases, start=1))
    strip = [_phase_part(*row, longest_s) for row in rows]
    return section(
        "phases",
        "Which phase ran when",
        note(typeset(about)),
        tag("div", strip, class_="strip", aria_hidden="true"),
        table(columns, rows, caption="Phases of the training, with their time and cost"),
    )


def _iterations(phase: summary.PhaseFacts) -> str:
    if phase.iterations < 2:
        return str(phase.start + 1) if phase.iterations else ""
    return f"{phase.start + 1}\u2013{phase.start + phase.iterations}"


def _phase_part(number: int, phase: summary.PhaseFacts, longest_s: float) -> Html:
    """Return a phase of the strip: its number and, where there is room, its name."""
    is_final = phase.cost_s is None
    shown_s = min(phase.seconds, longest_s) if is_final else phase.seconds
    css = " ".join(["final"] * is_final + ["cut"] * (shown_s < phase.seconds))
    return tag(
        "div",
        tag("b", str(number)),
        " ",
        tag("span", phase.name),
        class_=css or None,
        style=f"flex-grow:{shown_s:.6f}",
        title=f"{phase.name}: {units.duration(phase.seconds)}",
    )


def memory_section(memory: Sequence[RankMemory]) -> Html:
    """Return what each rank keeps in memory."""
    columns: list[Column[tuple[int, RankMemory]]] = [
        Column("Rank", lambda row: str(row[0]), numeric=True),
        Column("Parameters", lambda r: units.size(r[1].parameters_bytes), numeric=True, wide=True),
        Column("Gradients", lambda r: units.size(r[1].gradients_bytes), numeric=True, wide=True),
        Column("State", lambda r: units.size(r[1].state_bytes), numeric=True),
        Column("State, predicted", lambda r: units.size(r[1].predicted_state_bytes), numeric=True),
        Column("Peak", lambda row: units.size(row[1].peak_bytes), numeric=True),
    ]
    return section(
        "memory",
        "Memory by rank",
        note(
            "The state is the optimizer's. The peak is of the whole process, with code, data and "
            "activations."
        ),
        table(columns, list(enumerate(memory)), caption="Memory by rank"),
    )


def events_section(events: Sequence[Event]) -> Html:
    """Return what the run did, and when."""
    columns: list[Column[Event]] = [
        Column("Iteration", lambda event: str(event.iteration), numeric=True),
        Column("What happened", lambda event: typeset(event.text), css="text"),
    ]
    return section("events", "What the run did", table(columns, events, caption="Events"))
