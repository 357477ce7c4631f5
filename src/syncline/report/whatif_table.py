"""A what-if as a table for a terminal: a row a point."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from syncline.model.prediction import Prediction
from syncline.model.whatif import Crossing, Point, WhatIf
from syncline.report import terminal, units
from syncline.report.markup import Column
from syncline.report.whatif_words import (
    BOUNDS,
    REFERENCE,
    SETTINGS,
    crossing_text,
    notable_settings,
    setting_text,
    value_text,
)

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

    points = what_if.points

    def setting(field: str) -> Column[int]:
        def cell(index: int) -> str:
            return value_text(field, getattr(points[index].setting, field))

        return Column(f"\n{SETTINGS[field][0]}", cell, numeric=True)

    def figures(title: str, planner: str | None = None) -> list[Column[int]]:
        def of(point: Point) -> Prediction:
            return point.best if planner is None else point.of(planner)

        def efficiency(point: Point) -> str:
            return units.percent(point.efficiency(of(point)))

        return [
            Column(title, lambda index: time.text(of(points[index]).iteration_s), numeric=True),
            Column("\nexposed", lambda i: time.text(of(points[i]).exposed_s), numeric=True),
            Column("effi-\nciency", lambda index: efficiency(points[index]), numeric=True),
        ]

    columns: list[Column[int]] = [
        Column("", lambda index: str(index + 1), numeric=True),
        *map(setting, fields),
    ]
    if own_columns:
        for planner in planners:
            columns += figures(f"{planner}\n{time.name}", planner)
    else:
        columns.append(Column("\nfastest", lambda index: points[index].best.planner))
        columns += figures(f"iteration,\n{time.name}")
    limits = [BOUNDS[point.split(point.best).bound] for point in points]
    columns.append(Column("limited\nby", lambda index: limits[index]))
    pairs = itertools.pairwise(points)
    return terminal.table(
        columns,
        range(len(points)),
        marked=what_if.bottleneck.point,
        gaps={n for n, pair in enumerate(pairs, start=1) if _other_block(*pair, fields)},
        folds=False,
    )


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
