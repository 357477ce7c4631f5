"""The picture of a replay: every plan's measured and predicted time on one axis."""

from __future__ import annotations

from syncline.replay.result import Entry, Replay
from syncline.report import units
from syncline.report.chart import Axis
from syncline.report.markup import Html, tag

__all__ = ["replay_picture"]

WIDTH = 560
LEFT, RIGHT, TOP, BOTTOM, ROW = 104, 24, 34, 26, 26
LONGEST_NAME = 15


def _at(axis: Axis, seconds: float) -> float:
    return axis.at(seconds, LEFT, WIDTH - RIGHT)


def replay_picture(replay: Replay) -> Html:
    """Return the picture as SVG: a row a plan, the fastest at the top."""
    entries = replay.fastest_first
    values_s = [
        seconds
        for entry in entries
        for seconds in (*entry.spread_s, entry.predicted_s, replay.lower_bound_s)
    ]
    axis = Axis.between(values_s)
    bottom = TOP + ROW * len(entries)
    drawn = _frame(axis, bottom, units.TimeUnit(values_s))
    bound = _at(axis, replay.lower_bound_s)
    drawn.append(
        tag(
            "path",
            tag("title", f"lower bound: {units.duration(replay.lower_bound_s)}"),
            d=f"M{bound} {TOP - 4} V{bottom}",
            class_="line ideal",
        )
    )
    for number, entry in enumerate(entries):
        drawn += _row(entry, axis, TOP + ROW * number + ROW / 2)
    return tag(
        "svg",
        drawn,
        viewBox=f"0 0 {WIDTH} {bottom + BOTTOM}",
        class_="plot curves",
        role="img",
        aria_label="Measured and predicted time an iteration of every plan, with the lower bound. "
        "The table below says the same.",
    )


def _frame(axis: Axis, bottom: float, unit: units.TimeUnit) -> list[Html]:
    drawn = []
    for value in axis.ticks:
        place = _at(axis, value)
        drawn += [
            tag("line", x1=place, x2=place, y1=TOP, y2=bottom, class_="grid"),
            tag("text", _short(unit.text(value)), x=place, y=bottom + 18, class_="mid"),
        ]
    return [
        *drawn,
        tag(
            "text",
            "Seconds an iteration" if unit.name == "s" else "Milliseconds an iteration",
            x=0,
            y=12,
            class_="heading",
        ),
    ]


def _short(number: str) -> str:
    """Return a number without zeros behind its point."""
    return number.rstrip("0").rstrip(".") if "." in number else number


def _row(entry: Entry, axis: Axis, y: float) -> list[Html]:
    low, high = (_at(axis, seconds) for seconds in entry.spread_s)
    measured, predicted = _at(axis, entry.measured_s), _at(axis, entry.predicted_s)
    name = entry.planner
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 1]}\u2026"
    spread = " to ".join(units.duration(seconds) for seconds in entry.spread_s)
    return [
        tag("text", tag("title", entry.planner), name, x=LEFT - 12, y=y + 4, class_="end"),
        tag("path", tag("title", f"rounds: {spread}"), d=f"M{low} {y} H{high}", class_="line c-1"),
        tag(
            "path",
            tag("title", f"predicted: {units.duration(entry.predicted_s)}"),
            d=f"M{predicted - 6:.1f} {y} l6 -6 l6 6 l-6 6 Z",
            class_="dot c-0",
        ),
        tag(
            "circle",
            tag("title", f"measured: {units.duration(entry.measured_s)}"),
            cx=measured,
            cy=y,
            r=3.5,
            class_="mark",
        ),
    ]
