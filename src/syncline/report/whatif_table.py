"""A what-if as a table for a terminal: a row a point."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from syncline.model.prediction import Prediction
from syncline.model.whatif import Crossing, Point, WhatIf
from syncline.report import terminal, units
from syncline.report.whatif_words import (
    BOUNDS,
    REFERENCE,
    SETTINGS,
    crossing_text,
    notable_settings,
    setting_text,
    value_text,
)

__all__ = ["print_what_if", "what_if_table"]

FEW = 3
"""As many planners have columns of their own where there is room."""
MOST_CROSSINGS = 12


def print_what_if(console: Console, what_if: WhatIf) -> None:
    """Print the table: all columns to a file or a pipe, else as many as fit the screen."""
    table = what_if_table(what_if)
    points = _points(what_if, _fields(what_if), FEW)
    if not console.is_terminal:
        console.width = max(console.width, terminal.width(console, table))
    elif terminal.width(console, points) > console.width:
        table = what_if_table(what_if, few=1)
    console.print(table)


def what_if_table(what_if: WhatIf, *, few: int = FEW) -> RenderableType:
    """Return the points with what the planners make of them, and what limits the chosen one.

    Worker counts vary within a block; a blank line separates blocks. Up to ``few`` planners have
    columns of their own; of more, the fastest is shown.
    """
    fields = _fields(what_if)
    setting = what_if.points[0].setting
    constant = [field for field in notable_settings(setting) if field not in fields]
    where = [what_if.model, f"from {what_if.network}"]
    if described := setting_text(setting, constant):
        where.append(described)
    parts: list[RenderableType] = [
        Text(" · ".join(map(terminal.plain, where)), style="bold"),
        terminal.below(_points(what_if, fields, few)),
    ]
    if what_if.crossings:
        parts.append(terminal.below(_crossings(what_if, fields)))
    chosen = what_if.chosen
    place = setting_text(chosen.setting, fields)
    named = f"{place}, {what_if.bottleneck.planner}" if place else what_if.bottleneck.planner
    parts.append(
        terminal.below(
            Text.assemble(
                (f"{terminal.plain(named)} is ", "dim"), terminal.plain(what_if.bottleneck.sentence)
            )
        )
    )
    parts.append(
        terminal.below(
            Text("\n".join((REFERENCE, *map(terminal.plain, what_if.notes))), style="dim")
        )
    )
    return Group(*parts)


def _fields(what_if: WhatIf) -> list[str]:
    """Return the swept settings in the order of their columns."""
    return [field for field in SETTINGS if field in what_if.swept]


def _points(what_if: WhatIf, fields: Sequence[str], few: int) -> Table:
    planners = what_if.planners
    own_columns = len(planners) <= few
    shown = (point.predictions if own_columns else [point.best] for point in what_if.points)
    time = units.TimeUnit(prediction.iteration_s for row in shown for prediction in row)
    table = terminal.plain_table()
    table.add_column("", justify="right", no_wrap=True)
    for field in fields:
        table.add_column(f"\n{SETTINGS[field][0]}", justify="right", no_wrap=True)
    iteration = f"iteration,\n{time.name}"
    if own_columns:
        for planner in planners:
            table.add_column(f"{planner}\n{time.name}", justify="right", no_wrap=True)
            table.add_column("\nexposed", justify="right", no_wrap=True)
            table.add_column("effi-\nciency", justify="right", no_wrap=True)
    else:
        table.add_column("\nfastest", no_wrap=True)
        for heading in (iteration, "\nexposed", "effi-\nciency"):
            table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limited\nby", no_wrap=True)
    before: Point | None = None
    for index, point in enumerate(what_if.points):
        if before is not None and _other_block(before, point, fields):
            table.add_row()
        before = point
        cells = [str(index + 1)]
        cells += [value_text(field, getattr(point.setting, field)) for field in fields]
        if own_columns:
            for planner in planners:
                cells += _figures(point, point.of(planner), time)
        else:
            cells += [point.best.planner, *_figures(point, point.best, time)]
        cells.append(BOUNDS[point.split(point.best).bound])
        chosen = index == what_if.bottleneck.point
        table.add_row(*map(terminal.plain, cells), style="bold" if chosen else None)
    return table


def _figures(point: Point, prediction: Prediction, time: units.TimeUnit) -> list[str]:
    return [
        time.text(prediction.iteration_s),
        time.text(prediction.exposed_s),
        units.percent(point.efficiency(prediction)),
    ]


def _other_block(before: Point, after: Point, fields: Sequence[str]) -> bool:
    inner = fields[-1] if fields else ""
    return any(
        getattr(before.setting, field) != getattr(after.setting, field)
        for field in fields
        if field != inner
    )


def _crossings(what_if: WhatIf, fields: Sequence[str]) -> RenderableType:
    leaders = {point.best.planner for point in what_if.points}
    leading = [c for c in what_if.crossings if c.planner in leaders]
    leading.sort(key=lambda c: (not _beside_chosen(what_if, c), c.kind != "overtakes"))
    lines = []
    for crossing in leading[:MOST_CROSSINGS]:
        others = [field for field in fields if field != crossing.axis]
        place = setting_text(what_if.points[crossing.point].setting, others)
        lines.append(
            terminal.plain(f"{place}: " if place else "") + terminal.plain(crossing_text(crossing))
        )
    rest = len(what_if.crossings) - len(lines)
    if rest:
        lines.append(f"and {units.counted(rest, 'more crossing')}, all of them with --json")
    return Group(Text("Crossings", style="bold"), Text("\n".join(lines)))


def _beside_chosen(what_if: WhatIf, crossing: Crossing) -> bool:
    """Return whether a crossing lies on a curve through the chosen point."""
    there = msgspec.structs.asdict(what_if.points[crossing.point].setting)
    here = msgspec.structs.asdict(what_if.chosen.setting)
    return {**there, crossing.axis: None} == {**here, crossing.axis: None}
