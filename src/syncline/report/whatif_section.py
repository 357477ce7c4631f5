"""The sections of a what-if beside its curves: what limits the chosen point, and every point."""

from __future__ import annotations

from syncline.model.whatif import Bottleneck, PathPart, Point
from syncline.report import units
from syncline.report.bundle import Bundle
from syncline.report.markup import (
    Child,
    Column,
    Html,
    legend,
    note,
    section,
    stacked_bar,
    table,
    tag,
    typeset,
)
from syncline.report.summary import Summary
from syncline.report.timelines import KINDS
from syncline.report.whatif_curves import axis_section
from syncline.report.whatif_words import BOUNDS, PARTS, REFERENCE, notable_settings, setting_text

__all__ = ["bandwidth_section", "path_section", "points_section", "workers_section"]

LONGEST = 8
"""Parts of the critical path in the table."""
MOST_DRAWN = 600
"""Parts of the path that are drawn."""
SHOWN, MOST_POINTS = 24, 500
"""Points shown at once, and in all."""


def workers_section(bundle: Bundle, _: Summary) -> Html | None:
    """Return the curves against the worker count."""
    return None if bundle.what_if is None else axis_section(bundle.what_if, "workers")


def bandwidth_section(bundle: Bundle, _: Summary) -> Html | None:
    """Return the curves against the bandwidth."""
    return None if bundle.what_if is None else axis_section(bundle.what_if, "bandwidth_bytes_per_s")


def path_section(bundle: Bundle, _: Summary) -> Html | None:
    """Return the critical path of the point that the headline is about."""
    what_if = bundle.what_if
    if what_if is None or not what_if.bottleneck.path:
        return None
    found = what_if.bottleneck
    whole_s = sum(part.time_s for part in found.path) or 1.0
    setting = what_if.chosen.setting
    longest = sorted(found.path, key=lambda part: -part.time_s)[:LONGEST]
    columns = [
        Column(title="Longest on the path", css="name"),
        Column(title="Kind", wide=True),
        Column(title="Time", numeric=True),
        Column(title="Share", numeric=True),
    ]
    cells = [
        (
            _label(part),
            _kind(part.kind),
            units.duration(part.time_s),
            units.percent(part.time_s / whole_s),
        )
        for part in longest
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
        table(columns, cells, caption="Longest parts of the critical path"),
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


def points_section(bundle: Bundle, _: Summary) -> Html | None:
    """Return every point with its fastest planner."""
    what_if = bundle.what_if
    if what_if is None or len(what_if.points) < 2:
        return None
    best = [(point, point.best) for point in what_if.points]
    time = units.TimeUnit(prediction.iteration_s for _, prediction in best)
    longest_s = max(prediction.iteration_s for _, prediction in best) or 1.0
    columns = [
        Column(title="No.", numeric=True, wide=True),
        Column(title="Point"),
        Column(title="Fastest"),
        Column(title="", wide=True, css="bar"),
        Column(title=f"Iteration, {time.name}", numeric=True),
        Column(title=f"Exposed, {time.name}", numeric=True, wide=True),
        Column(title="Efficiency", numeric=True),
        Column(title="Speed-up", numeric=True, wide=True),
        Column(title="Limited by", wide=True),
    ]
    rows: list[tuple[Child, ...]] = [
        (
            str(number),
            typeset(setting_text(point.setting, what_if.swept)),
            prediction.planner,
            _split_bar(point, longest_s),
            time.text(prediction.iteration_s),
            time.text(prediction.exposed_s),
            units.percent(point.efficiency(prediction)),
            f"{point.speed_up(prediction):.1f}",
            BOUNDS[point.split(prediction).bound],
        )
        for number, (point, prediction) in enumerate(best[:MOST_POINTS], start=1)
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
        parts.append(
            tag(
                "details",
                tag("summary", more),
                table(columns, rows[SHOWN:], caption=caption, marked=inner),
            )
        )
    left_out = len(best) - len(rows)
    if left_out:
        text = f"{units.counted(left_out, 'further point')} and all planners: what-if.json."
        parts.append(note(text))
    parts += [note(text) for text in what_if.notes]
    return section("points", "Every point", *parts)


def _split_bar(point: Point, longest_s: float) -> Html:
    split = point.split(point.best)
    parts = ((getattr(split, field), part.css) for field, part in PARTS.items())
    return stacked_bar(parts, longest_s)
