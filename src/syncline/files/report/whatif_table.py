"""A what-if as a table for a terminal: a row a point."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from syncline.files.report import terminal, units
from syncline.files.report.markup import Column
from syncline.files.report.whatif_words import (
    BOUNDS,
    REFERENCE,
    SETTINGS,
    crossing_text,
    notable_settings,
    setting_text,
    value_text,
)
from syncline.plan.prediction import Prediction
from syncline.plan.whatif import Crossing, WhatIf

FEW = 3  # up to this many planners have columns of their own where there is room
MOST_CROSSINGS = 12


def print_what_if(console: Console, what_if: WhatIf) -> None:
    """Print the table: all columns to a file or a pipe, else as many as fit the screen."""
    screen = console.width if console.is_terminal else math.inf
    for few, intervals in ((FEW, True), (FEW, False), (1, True), (1, False)):
        points = _points(what_if, few, intervals=intervals)
        if terminal.width(console, points) <= screen:
            break
    table = _with_text(what_if, points)
    if not console.is_terminal:
        console.width = max(console.width, terminal.width(console, table))
    console.print(table)


def _with_text(what_if: WhatIf, points: Table) -> RenderableType:
    """Return the points, and what limits the chosen one."""
    fields = _fields(what_if)
    setting = what_if.points[0].setting
    constant = [field for field in notable_settings(setting) if field not in fields]
    where = (what_if.model, f"from {what_if.network}", setting_text(setting, constant))
    parts: list[RenderableType] = [
        Text(" · ".join(map(terminal.plain, filter(None, where))), style="bold"),
        points,
    ]
    if what_if.crossings:
        parts.append(_crossings(what_if, fields))
    named = (setting_text(what_if.chosen.setting, fields), what_if.bottleneck.planner)
    limited = f"{terminal.plain(', '.join(filter(None, named)))} is "
    parts += [
        Text.assemble((limited, "dim"), terminal.plain(what_if.bottleneck.sentence)),
        Text("\n".join((REFERENCE, *map(terminal.plain, what_if.notes))), style="dim"),
    ]
    return Group(parts[0], *map(terminal.below, parts[1:]))


def _fields(what_if: WhatIf) -> list[str]:
    """Return the swept settings in the order of their columns."""
    return [field for field in SETTINGS if field in what_if.swept]


def _points(what_if: WhatIf, few: int, *, intervals: bool) -> Table:
    """Return a row a point; blank lines separate rows that differ in more than the workers.

    Up to ``few`` planners have columns of their own; of more, the fastest is shown.
    """
    points, fields = what_if.points, _fields(what_if)
    best = [point.best for point in points]
    own = {planner: [point.of(planner) for point in points] for planner in what_if.planners}
    if len(own) > few:
        own = {}
    time = units.TimeUnit(p.iteration_s for found in own.values() or [best] for p in found)

    def setting(field: str) -> Column[int]:
        def cell(index: int) -> str:
            return value_text(field, getattr(points[index].setting, field))

        return Column(f"\n{SETTINGS[field][0]}", cell, numeric=True)

    def figures(title: str, found: Sequence[Prediction]) -> list[Column[int]]:
        def efficiency(index: int) -> str:
            return units.percent(points[index].efficiency(found[index]))

        ends = [time.between(prediction.interval_s) for prediction in found]
        return [
            Column(title, lambda index: time.text(found[index].iteration_s), numeric=True),
            *([Column("90 %\ninterval", ends.__getitem__, numeric=True)] if intervals else ()),
            Column("\nexposed", lambda index: time.text(found[index].exposed_s), numeric=True),
            Column("effi-\nciency", efficiency, numeric=True),
        ]

    columns: list[Column[int]] = [
        Column("", lambda index: str(index + 1), numeric=True),
        *map(setting, fields),
    ]
    for planner, found in own.items():
        columns += figures(f"{planner}\n{time.name}", found)
    if not own:
        columns.append(Column("\nfastest", lambda index: best[index].planner))
        columns += figures(f"iteration,\n{time.name}", best)
    limits = [BOUNDS[point.split(point.best).bound] for point in points]
    columns.append(Column("limited\nby", lambda index: limits[index]))
    blocks = [[getattr(point.setting, field) for field in fields[:-1]] for point in points]
    return terminal.table(
        columns,
        range(len(points)),
        marked=what_if.bottleneck.point,
        gaps={n for n in range(1, len(points)) if blocks[n] != blocks[n - 1]},
        folds=False,
    )


def _crossings(what_if: WhatIf, fields: Sequence[str]) -> RenderableType:
    leaders = {point.best.planner for point in what_if.points}
    leading = [c for c in what_if.crossings if c.planner in leaders]
    leading.sort(key=lambda c: (not _beside_chosen(what_if, c), c.kind != "overtakes"))
    lines = []
    for crossing in leading[:MOST_CROSSINGS]:
        others = [field for field in fields if field != crossing.axis]
        place = setting_text(what_if.points[crossing.point].setting, others)
        lines.append(terminal.plain(": ".join(filter(None, (place, crossing_text(crossing))))))
    if rest := len(what_if.crossings) - len(lines):
        lines.append(f"and {units.counted(rest, 'more crossing')}, all of them with --json")
    return Group(Text("Crossings", style="bold"), Text("\n".join(lines)))


def _beside_chosen(what_if: WhatIf, crossing: Crossing) -> bool:
    """Return whether a crossing lies on a curve through the chosen point."""
    there, here = what_if.points[crossing.point].setting, what_if.chosen.setting
    return msgspec.structs.replace(there, **{crossing.axis: getattr(here, crossing.axis)}) == here
