"""The picture of a replay: every plan's measured and predicted time on one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from syncline.replay.result import Entry, Replay
from syncline.report import units
from syncline.report.markup import Html, tag

__all__ = ["replay_picture"]

WIDTH = 560
LEFT, RIGHT, TOP, BOTTOM, ROW = 104, 24, 34, 26, 26
LONGEST_NAME = 15
MOST_TICKS = 6


class _Axis:
    """Maps seconds to positions; spans a little more than the values, from round to round."""

    def __init__(self, values_s: Sequence[float]) -> None:
        low, high = min(values_s), max(values_s)
        rough = max(high - low, high * 0.02) / (MOST_TICKS - 2)
        power = 10.0 ** math.floor(math.log10(rough))
        self._step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
        self._low = math.floor(low / self._step - 0.25) * self._step
        self._high = math.ceil(high / self._step + 0.25) * self._step

    def at(self, seconds: float) -> float:
        share = (seconds - self._low) / (self._high - self._low)
        return round(LEFT + share * (WIDTH - RIGHT - LEFT), 1)

    def ticks(self) -> list[float]:
        count = round((self._high - self._low) / self._step)
        return [self._low + self._step * index for index in range(count + 1)]


def replay_picture(replay: Replay) -> Html:
    """Return the picture as SVG: a row a plan, the fastest at the top."""
    entries = replay.fastest_first
    values_s = [
        seconds
        for entry in entries
        for seconds in (*entry.spread_s, entry.predicted_s, replay.lower_bound_s)
    ]
    axis = _Axis(values_s)
    bottom = TOP + ROW * len(entries)
    drawn = _frame(axis, bottom, units.TimeUnit(values_s))
    bound = axis.at(replay.lower_bound_s)
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


def _frame(axis: _Axis, bottom: float, unit: units.TimeUnit) -> list[Html]:
    drawn = []
    for value in axis.ticks():
        place = axis.at(value)
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


def _row(entry: Entry, axis: _Axis, y: float) -> list[Html]:
    low, high = map(axis.at, entry.spread_s)
    measured, predicted = axis.at(entry.measured_s), axis.at(entry.predicted_s)
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
