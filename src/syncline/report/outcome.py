"""The sections that say how it went: key figures, planners, predicted against measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.report import units
from syncline.report.facts import PlannerRow
from syncline.report.markup import Column, Html, bar, section, table, tag, typeset
from syncline.report.summary import Summary
from syncline.report.verdict import figure_text

if TYPE_CHECKING:
    from syncline.report.bundle import Bundle

__all__ = ["checks_section", "figures_section", "planners_section"]


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
        tag(
            "p",
            "Predicted for ",
            f"{planners.network}, {units.counted(planners.workers, 'worker')}. ",
            tag("span", class_="swatch k-backward"),
            " computing, ",
            tag("span", class_="swatch exposed"),
            " communication that nothing hides, ",
            tag("span", class_="swatch tick"),
            " the lower bound that no schedule can pass.",
            class_="note",
        ),
        table(columns, cells, caption=caption, marked=marked),
        tag(
            "p",
            tag("b", f"Why {planners.chosen}: "),
            typeset(planners.reason.rstrip(". ") + "."),
            class_="why",
        ),
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
    """Return what was predicted beside what was measured."""
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
        tag(
            "p",
            "A positive error means that the prediction was too slow. Values with noise are "
            "medians over many iterations.",
            class_="note",
        ),
        table(columns, cells, caption="Predicted and measured times"),
    )
