"""The plot of a network's fit: measured all-reduces and the fitted curve, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence

from syncline.model.network import Network
from syncline.report import units
from syncline.report.markup import Html, tag

__all__ = ["fit_plot"]

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 28, 44
STEPS = 120


class _LogAxis:
    """Maps values to positions; spans whole powers of ten around ``values``."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        self._low = math.floor(math.log10(min(values)))
        self._high = max(math.ceil(math.log10(max(values))), self._low + 1)
        self._start, self._stop = start, stop

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return round(self._start + share * (self._stop - self._start), 2)

    def ticks(self) -> list[float]:
        every = 1 if self._high - self._low <= 7 else 2
        return [10.0**power for power in range(self._low, self._high + 1, every)]


def fit_plot(network: Network) -> Html | None:
    """Return the plot as SVG, or None if the network has no measured points to show."""
    points = [(p.size_bytes, p.time_s) for p in network.points if p.size_bytes and p.time_s > 0]
    if not points:
        return None
    sizes = sorted(size for size, _ in points)
    first, last = math.log10(sizes[0]), math.log10(sizes[-1])
    curve = []
    for step in range(STEPS + 1):
        size_bytes = round(10 ** (first + (last - first) * step / STEPS))
        seconds = network.all_reduce.seconds(size_bytes)
        if seconds > 0:
            curve.append((size_bytes, seconds))
    x = _LogAxis(sizes, LEFT, WIDTH - RIGHT)
    y = _LogAxis([t for _, t in (*points, *curve)], HEIGHT - BOTTOM, TOP)
    path = "M" + " L".join(f"{x.at(size)} {y.at(seconds)}" for size, seconds in curve)
    return tag(
        "svg",
        _axes(x, y),
        tag("path", d=path, class_="curve") if curve else None,
        [
            tag(
                "circle",
                tag("title", f"{units.size(size)}: {units.duration(seconds)} measured"),
                cx=x.at(size),
                cy=y.at(seconds),
                r=3,
                class_="point",
            )
            for size, seconds in points
        ],
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="plot",
        role="img",
        aria_label=f"Time of an all-reduce against its size: {len(points)} measured points "
        "and the fitted curve",
    )


def _axes(x: _LogAxis, y: _LogAxis) -> list[Html]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    marks = []
    for value in x.ticks():
        marks += [
            tag("line", x1=x.at(value), x2=x.at(value), y1=TOP, y2=bottom, class_="grid"),
            tag("text", _round(units.size(value)), x=x.at(value), y=bottom + 17, class_="mid"),
        ]
    for value in y.ticks():
        marks += [
            tag("line", x1=LEFT, x2=right, y1=y.at(value), y2=y.at(value), class_="grid"),
            tag("text", _round(units.duration(value)), x=LEFT - 8, y=y.at(value) + 4, class_="end"),
        ]
    marks += [
        tag("text", "time of an all-reduce", x=0, y=12),
        tag("text", "message size", x=right, y=HEIGHT - 6, class_="end"),
    ]
    return marks


def _round(text: str) -> str:
    """Return a power of ten without its zero decimals: ``1 kB`` for ``1.00 kB``."""
    number, unit = text.split(" ")
    return f"{float(number):.0f}\u00a0{unit}"
