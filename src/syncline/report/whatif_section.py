"""The sections of a what-if beside its curves: what limits the chosen point, and every point.

Each is None where there is nothing to show.
"""

from __future__ import annotations

from typing import NamedTuple

from syncline.model.prediction import Prediction
from syncline.model.whatif import Bottleneck, PathPart, Point, WhatIf
from syncline.report import units
from syncline.report.markup import (
    Child,
    Column,
    Html,
    folded,
    legend,
    note,
    section,
    stacked_bar,
    table,
    tag,
    typeset,
)
from syncline.report.timelines import KINDS
from syncline.report.whatif_words import BOUNDS, PARTS, REFERENCE, notable_settings, setting_text

LONGEST = 8
"""Parts of the critical path in the table."""
MOST_DRAWN = 600
"""Parts of the path that are drawn."""
SHOWN, MOST_POINTS = 24, 500
"""Points shown at once, and in all."""


def path_section(what_if: WhatIf | None) -> Html | None:
    """Return the critical path of the point that the headline is about."""
    if what_if is None or not what_if.bottleneck.path:
        return None
    found = what_if.bottleneck
    whole_s = sum(part.time_s for part in found.path) or 1.0
    setting = what_if.chosen.setting
    longest = sorted(found.path, key=lambda part: -part.time_s)[:LONGEST]
    columns: list[Column[PathPart]] = [
        Column("Longest on the path", _label, css="name"),
        Column("Kind", lambda part: _kind(part.kind), wide=True),
        Column("Time", lambda part: units.duration(part.time_s), numeric=True),
        Column("Share", lambda part: units.percent(part.time_s / whole_s), numeric=True),
    ]
    return section(
        "path",
        "The critical path",
        note(
            "The chain of tasks that each began the moment the one before ended: only what is on "
            f"it can shorten the iteration. One iteration of {found.planner} in the steady state, "
            f"{setting_text(setting, notable_settings(setting))}, from left to right."
        ),
        tag("div", _path_bar(found, whole_s), class_="phases"),
        legend(
            (
                _css(kind),
                typeset(
                    f"{_kind(kind)} {units.duration(seconds)}, {units.percent(seconds / whole_s)}"
                ),
            )
            for kind, seconds in found.by_kind().items()
            if seconds > 0
        ),
        table(columns, longest, caption="Longest parts of the critical path"),
    )


def _path_bar(found: Bottleneck, whole_s: float) -> Html:
    shortest_s = min(sorted(part.time_s for part in found.path)[-MOST_DRAWN:])
    parts = ((p.time_s, _css(p.kind) if p.time_s >= shortest_s else "") for p in found.path)
    return stacked_bar(parts, whole_s)


def _css(kind: str) -> str:
    return "k-message" if kind == "delay" else f"k-{kind}"


def _kind(kind: str) -> str:
    return KINDS.get(kind, {"delay": "held back"}.get(kind, kind))


def _label(part: PathPart) -> str:
    return part.label if part.rank is None else f"{part.label} (rank {part.rank})"


class _Row(NamedTuple):
    number: int
    point: Point
    best: Prediction


def points_section(what_if: WhatIf | None) -> Html | None:
    """Return every point with its fastest planner."""
    if what_if is None or len(what_if.points) < 2:
        return None
    rows = [_Row(n, point, point.best) for n, point in enumerate(what_if.points, start=1)]
    swept, time = what_if.swept, units.TimeUnit(row.best.iteration_s for row in rows)
    longest_s = max(row.best.iteration_s for row in rows) or 1.0
    left_out = len(rows[MOST_POINTS:])
    del rows[MOST_POINTS:]
    columns: list[Column[_Row]] = [
        Column("No.", lambda row: str(row.number), numeric=True, wide=True),
        Column("Point", lambda row: typeset(setting_text(row.point.setting, swept))),
        Column("Fastest", lambda row: row.best.planner),
        Column("", lambda row: _split_bar(row.point, longest_s), wide=True, css="bar"),
        Column(f"Iteration, {time.name}", lambda r: time.text(r.best.iteration_s), numeric=True),
        Column(
            f"Exposed, {time.name}",
            lambda row: time.text(row.best.exposed_s),
            numeric=True,
            wide=True,
        ),
        Column("Efficiency", lambda r: units.percent(r.point.efficiency(r.best)), numeric=True),
        Column("Speed-up", lambda r: f"{r.point.speed_up(r.best):.1f}", numeric=True, wide=True),
        Column("Limited by", lambda row: BOUNDS[row.point.split(row.best).bound], wide=True),
    ]
    caption = "Every point of the sweep with its fastest planner"
    marked = what_if.bottleneck.point
    parts: list[Child] = [
        note(
            [
                [tag("span", class_=f"swatch {part.css}"), f" {part.name}, "]
                for part in PARTS.values()
            ],
            "of the fastest planner. ",
            None if set(what_if.swept) & {"workers", "bandwidth_bytes_per_s"} else REFERENCE,
        ),
        table(columns, rows[:SHOWN], caption=caption, marked=marked if marked < SHOWN else None),
    ]
    if len(rows) > SHOWN:
        more = units.counted(len(rows) - SHOWN, "more point")
        inner = marked - SHOWN if marked >= SHOWN else None
        parts.append(folded(more, table(columns, rows[SHOWN:], caption=caption, marked=inner)))
    if left_out:
        text = f"{units.counted(left_out, 'further point')} and all planners: what-if.json."
        parts.append(note(text))
    parts += [note(text) for text in what_if.notes]
    return section("points", "Every point", *parts)


def _split_bar(point: Point, longest_s: float) -> Html:
    split = point.split(point.best)
    parts = ((getattr(split, field), part.css) for field, part in PARTS.items())
    return stacked_bar(parts, longest_s)
