"""The sections of a what-if beside its curves: what limits the chosen point, and every point."""

from __future__ import annotations

from syncline.files.report import units
from syncline.files.report.markup import (
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
from syncline.files.report.timelines import KINDS
from syncline.files.report.whatif_words import (
    BOUNDS,
    PARTS,
    REFERENCE,
    notable_settings,
    setting_text,
)
from syncline.plan.whatif import PathPart, Point, WhatIf

LONGEST = 8  # parts of the critical path in the table
MOST_DRAWN = 600  # parts of the path that are drawn
SHOWN, MOST_POINTS = 24, 500  # points shown at once, and in all
PATH_KINDS = {**KINDS, "delay": "held back"}


def path_section(what_if: WhatIf) -> Html | None:
    """Return the critical path of the point in the headline; None if it has none."""
    found = what_if.bottleneck
    if not found.path:
        return None
    whole_s = sum(part.time_s for part in found.path) or 1.0
    setting = what_if.chosen.setting
    longest = sorted(found.path, key=lambda part: -part.time_s)
    least_s = longest[:MOST_DRAWN][-1].time_s
    drawn = ((p.time_s, _css(p.kind) if p.time_s >= least_s else "") for p in found.path)
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
            "The chain of tasks that each began when the one before ended. Only a shorter task of "
            f"this chain shortens the iteration. One iteration of {found.planner}, steady state, "
            f"{setting_text(setting, notable_settings(setting))}, from left to right."
        ),
        tag("div", stacked_bar(drawn, whole_s), class_="phases"),
        legend(
            (
                _css(kind),
                typeset(f"{_kind(kind)} {units.duration(s)}, {units.percent(s / whole_s)}"),
            )
            for kind, s in found.by_kind().items()
            if s > 0
        ),
        table(columns, longest[:LONGEST], caption="Longest parts of the critical path"),
    )


def _css(kind: str) -> str:
    return "k-message" if kind == "delay" else f"k-{kind}"


def _kind(kind: str) -> str:
    return PATH_KINDS.get(kind, kind)


def _label(part: PathPart) -> str:
    return part.label if part.rank is None else f"{part.label} (rank {part.rank})"


def points_section(what_if: WhatIf) -> Html | None:
    """Return every point with its fastest planner; None for a single point."""
    if len(what_if.points) < 2:
        return None
    points, swept = what_if.points, what_if.swept
    best = [point.best for point in points]
    time = units.TimeUnit(prediction.iteration_s for prediction in best)
    ends = [time.between(prediction.interval_s) for prediction in best]
    longest_s = max(prediction.iteration_s for prediction in best) or 1.0
    columns: list[Column[int]] = [
        Column("No.", lambda i: str(i + 1), numeric=True, wide=True),
        Column("Point", lambda i: typeset(setting_text(points[i].setting, swept))),
        Column("Fastest", lambda i: best[i].planner),
        Column("", lambda i: _split_bar(points[i], longest_s), wide=True, css="bar"),
        Column(f"Iteration, {time.name}", lambda i: time.text(best[i].iteration_s), numeric=True),
        Column("90 % interval", ends.__getitem__, numeric=True, wide=True),
        Column(
            f"Exposed, {time.name}", lambda i: time.text(best[i].exposed_s), numeric=True, wide=True
        ),
        Column("Efficiency", lambda i: units.percent(points[i].efficiency(best[i])), numeric=True),
        Column("Limited by", lambda i: BOUNDS[points[i].split(best[i]).bound], wide=True),
    ]
    rows = range(len(points))[:MOST_POINTS]
    caption = "Every point of the sweep with its fastest planner"
    marked = what_if.bottleneck.point
    parts: list[Child] = [
        note(
            [[tag("span", class_=f"swatch {p.css}"), f" {p.name}, "] for p in PARTS.values()],
            "of the fastest planner. ",
            None if {"workers", "bandwidth_bytes_per_s"} & set(swept) else REFERENCE,
        ),
        table(columns, rows[:SHOWN], caption=caption, marked=marked),
    ]
    if rest := rows[SHOWN:]:
        unfolded = table(columns, rest, caption=caption, marked=marked - SHOWN)
        parts.append(folded(units.counted(len(rest), "more point"), unfolded))
    if left_out := len(points) - len(rows):
        text = f"{units.counted(left_out, 'further point')} and all planners: what-if.json."
        parts.append(note(text))
    parts += [note(text) for text in what_if.notes]
    return section("points", "Every point", *parts)


def _split_bar(point: Point, longest_s: float) -> Html:
    split = point.split(point.best)
    parts = ((getattr(split, field), part.css) for field, part in PARTS.items())
    return stacked_bar(parts, longest_s)
