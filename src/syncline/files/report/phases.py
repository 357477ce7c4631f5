"""The section with the phases of a training: a strip to scale, and what each has cost."""

from __future__ import annotations

import math

from syncline.files.report import units
from syncline.files.report.markup import Column, Html, note, section, table, tag, typeset
from syncline.files.report.summary import PhaseFacts, RunFacts

LONGEST = 0.5
"""The final iterations are drawn at most this long, as a share of all phases before."""


def phases_section(run: RunFacts | None) -> Html | None:
    """Return which phase ran when, and what it has cost."""
    if run is None or not run.phases:
        return None
    costs_s = [phase.cost_s for phase in run.phases if phase.cost_s is not None]
    counted = [phase for phase in run.phases if phase.cost_s is not None] or run.phases
    time = units.TimeUnit(phase.seconds for phase in counted)
    longest_s = LONGEST * math.fsum(phase.seconds for phase in counted)
    columns: list[Column[tuple[int, PhaseFacts]]] = [
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
    return section(
        "phases",
        "Which phase ran when",
        note(typeset(about)),
        tag("div", [_part(*row, longest_s) for row in rows], class_="strip", aria_hidden="true"),
        table(columns, rows, caption="Phases of the training, with their time and cost"),
    )


def _iterations(phase: PhaseFacts) -> str:
    if phase.iterations < 2:
        return str(phase.start + 1) if phase.iterations else ""
    return f"{phase.start + 1}\u2013{phase.start + phase.iterations}"


def _part(number: int, phase: PhaseFacts, longest_s: float) -> Html:
    """Return a phase of the strip; its number always shows, its name where there is room."""
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
