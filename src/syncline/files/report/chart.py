"""Charts as plain SVG: axes with round ticks, lines, stacked bars, a network's fitted cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.files.report import units
from syncline.files.report.markup import Html, tag
from syncline.plan.network import Network

MOST_TICKS = 6
ROUND = (1, 2, 5, 10)  # mantissas of round numbers
TICK_SHARE = 0.12  # least distance of two ticks of Axis.of, as a share of the axis


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high``, logarithmic or linear."""

    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    @classmethod
    def log(cls, low: float, high: float, ticks: Sequence[float]) -> Axis:
        """Return a logarithmic axis whose length is never 0."""
        return cls(low, high if high > low else low * 2, ticks, logarithmic=True)

    @classmethod
    def around(cls, values: Sequence[float]) -> Axis:
        """Return a logarithmic axis around values above 0 that ends at 1, 2 or 5 times 10^n."""
        low, high = 1 / _round_up(1 / min(values), ROUND), _round_up(max(values), ROUND)
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        every_round = (m * 10.0**power for power in range(first, last + 1) for m in (1, 2, 5))
        ticks = [v for v in every_round if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if len(ticks) > MOST_TICKS:
            ticks = [v for v in ticks if f"{v:.0e}".startswith("1")]
        every = math.ceil(len(ticks) / MOST_TICKS)
        return cls.log(low, high, ticks[::every])

    @classmethod
    def of(cls, values: Sequence[float]) -> Axis:
        """Return the logarithmic axis from the first to the last value, with ticks at some of them.

        Ticks are at every n-th value including the last, with the least n that leaves room for
        labels. If no n does, they are at those values that have room.
        """
        axis = cls.log(values[0], values[-1], values)
        last = len(values) - 1
        for every in (n for n in range(1, last) if last % n == 0):
            if axis.has_room(values[::every]):
                return cls.log(values[0], values[-1], values[::every])
        ticks = [values[0]]
        for value in values[1:-1]:
            if axis.has_room((ticks[-1], value, values[-1])):
                ticks.append(value)
        return cls.log(values[0], values[-1], [*ticks, values[-1]])

    @classmethod
    def up_to(cls, high: float) -> Axis:
        """Return the linear axis from 0 to a value above 0, with three to six round ticks."""
        step = _round_up(high / 4, (1, 2, 2.5, 5, 10))
        return cls(0.0, high, [step * index for index in range(int(high / step * (1 + 1e-9)) + 1)])

    @classmethod
    def between(cls, values: Sequence[float]) -> Axis:
        """Return the linear axis from tick to tick that covers slightly more than the values."""
        low, high = min(values), max(values)
        step = _round_up(max(high - low, high * 0.02) / (MOST_TICKS - 2), ROUND)
        low = math.floor(low / step - 0.25) * step
        high = math.ceil(high / step + 0.25) * step
        count = round((high - low) / step)
        return cls(low, high, [low + step * index for index in range(count + 1)])

    def has_room(self, ticks: Sequence[float]) -> bool:
        """Return whether ticks are far enough apart for their labels."""
        places = [self.share(value) for value in ticks]
        return all(b - a >= TICK_SHARE for a, b in itertools.pairwise(places))

    def share(self, value: float) -> float:
        """Return the place of a value: 0 at the low end, 1 at the high one."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def at(self, value: float, start: float, stop: float) -> float:
        """Return the coordinate of a value on an axis drawn from ``start`` to ``stop``."""
        return round(start + self.share(value) * (stop - start), 1)


def _round_up(value: float, mantissas: Sequence[float]) -> float:
    """Return the smallest product of a mantissa and a power of ten that is at least ``value``."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * m for m in mantissas if power * m >= value * (1 - 1e-9))


WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 96, 30, 44
LABEL_STEP = 15  # least distance of two labels at the right
BAR_SHARE = 0.76  # width of a bar, as a share of the room for it
THIN = 0.02  # share of the last bar below which a part has no label
FIT_STEPS = 120  # points of the fitted curve

Text = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    label: str  # written at its right end; empty for none
    css: str
    points: Sequence[tuple[float, float]]
    titles: Sequence[str] = ()
    """The tooltip of each point. Without titles, points are not drawn and the line is clipped to
    the axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A numbered place on a chart."""

    number: int
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of parts, the lowest first."""

    label: str  # below the bar
    parts: Sequence[tuple[str, str, float, str]]
    """(name, class, height, tooltip) of each; names are written beside the last bar."""


def line_chart(
    lines: Sequence[Line],
    *,
    x: Axis,
    y: Axis,
    x_text: Text,
    y_text: Text,
    title: str,
    x_title: str,
    about: str,
    marks: Sequence[Mark] = (),
) -> Html:
    """Return lines as SVG, the last on top; ``about`` is for screen readers."""

    def at_x(value: float) -> float:
        return x.at(value, LEFT, WIDTH - RIGHT)

    drawn = _frame(y, y_text, title, x_title)
    for value in x.ticks:
        place, bottom = at_x(value), HEIGHT - BOTTOM
        drawn += [
            tag("line", x1=place, x2=place, y1=bottom, y2=bottom + 4, class_="rule"),
            tag("text", x_text(value), x=place, y=bottom + 19, class_="mid"),
        ]
    for line in lines:
        places = [(at_x(a), _at_y(y, b)) for a, b in line.points]
        path = "M" + " L".join(f"{a} {b}" for a, b in places)
        stroke = tag("path", d=path, class_=f"line {line.css}")
        drawn.append(stroke if line.titles else _inside(stroke))
        drawn += [
            tag("circle", tag("title", text), cx=a, cy=b, r=3, class_=f"dot {line.css}")
            for (a, b), text in zip(places, line.titles, strict=False)
        ]
    ends = [(_at_y(y, line.points[-1][1]), line.label, line.css) for line in lines if line.label]
    drawn += _labels(ends)
    for mark in marks:
        a, b = at_x(mark.x), _at_y(y, mark.y)
        circle = tag("circle", cx=a, cy=b, r=8, class_="mark")
        number = tag("text", str(mark.number), x=a, y=b + 4, class_="mid number")
        drawn.append(tag("g", tag("title", mark.title), circle, number))
    return picture(drawn, about)


def bar_chart(bars: Sequence[Bar], *, y_text: Text, title: str, x_title: str, about: str) -> Html:
    """Return stacked bars as SVG, on a linear axis from 0."""
    heights = [math.fsum(height for _, _, height, _ in bar.parts) for bar in bars]
    y = Axis.up_to(max(heights)) if max(heights) > 0 else Axis(0.0, 1.0, [0.0])
    drawn = _frame(y, y_text, title, x_title)
    room = (WIDTH - RIGHT - LEFT) / len(bars)
    wide = round(room * BAR_SHARE, 1)
    # Every n-th bar is labelled, with the last one if possible.
    least, last = math.ceil(len(bars) / MOST_TICKS), len(bars) - 1
    every = next((n for n in range(least, last // 2 + 1) if last % n == 0), least)
    ends: list[tuple[float, str, str]] = []
    for index, bar in enumerate(bars):
        left = round(LEFT + room * (index + (1 - BAR_SHARE) / 2), 1)
        below = 0.0
        for name, css, height, text in bar.parts:
            top, foot = _at_y(y, below + height), _at_y(y, below)
            tall = round(foot - top, 1)
            drawn.append(
                tag("rect", tag("title", text), x=left, y=top, width=wide, height=tall, class_=css)
            )
            if index == len(bars) - 1 and height >= THIN * heights[-1]:
                ends.append(((top + foot) / 2, name, ""))
            below += height
        if index % every == 0:
            middle = round(LEFT + room * (index + 0.5), 1)
            drawn.append(tag("text", bar.label, x=middle, y=HEIGHT - BOTTOM + 19, class_="mid"))
    return picture(drawn + _labels(ends), about)


def _inside(drawn: Html) -> Html:
    """Return a drawing clipped to the axes."""
    x, y, width, height = LEFT, TOP - 1, WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP + 2
    box = f"{x} {y} {width} {height}"
    return tag("svg", drawn, x=x, y=y, width=width, height=height, viewBox=box, class_="inside")


def _at_y(y: Axis, value: float) -> float:
    return y.at(value, HEIGHT - BOTTOM, TOP)


def picture(drawn: Sequence[Html], about: str, width: int = WIDTH, height: float = HEIGHT) -> Html:
    """Return a drawing as SVG; ``about`` says what it shows, for screen readers."""
    box = f"0 0 {width} {height}"
    return tag("svg", drawn, viewBox=box, class_="plot", role="img", aria_label=about)


def _frame(y: Axis, y_text: Text, title: str, x_title: str) -> list[Html]:
    """Return the axis at the left with its grid, and the titles."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    drawn = []
    for value in y.ticks:
        place = _at_y(y, value)
        drawn += [
            tag("line", x1=LEFT, x2=right, y1=place, y2=place, class_="grid"),
            tag("text", y_text(value), x=LEFT - 8, y=place + 4, class_="end"),
        ]
    return [
        *drawn,
        tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="rule"),
        tag("text", title, x=0, y=12, class_="heading"),
        tag("text", x_title, x=right, y=HEIGHT - 5, class_="end"),
    ]


def _labels(ends: Sequence[tuple[float, str, str]]) -> list[Html]:
    """Return (height, label, class) as labels at the right, moved apart where they would touch."""
    by_height = sorted(ends)
    places: list[float] = []
    for wanted, _, _ in by_height:
        places.append(max(wanted, places[-1] + LABEL_STEP if places else TOP))
    limit = float(HEIGHT - BOTTOM)
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - LABEL_STEP
    drawn, x = [], WIDTH - RIGHT
    for (wanted, label, css), place in zip(by_height, places, strict=True):
        drawn += [
            tag("path", d=f"M{x + 3} {wanted:.1f} L{x + 12} {place:.1f}", class_=f"leader {css}"),
            tag("text", label, x=x + 16, y=round(place + 4, 1), class_=f"name {css}".strip()),
        ]
    return drawn


def fit_plot(network: Network) -> Html | None:
    """Return the network's measured points and fitted curve as SVG; None without points."""
    points = [(p.size_bytes, p.time_s) for p in network.points if p.size_bytes and p.time_s > 0]
    if not points:
        return None
    sizes = [size for size, _ in points]
    low, growth = min(sizes), max(sizes) / min(sizes)
    steps = (round(low * growth ** (step / FIT_STEPS)) for step in range(FIT_STEPS + 1))
    fitted = ((size, network.all_reduce.seconds(size)) for size in steps)
    curve = [(size, seconds) for size, seconds in fitted if seconds > 0]
    titles = [f"{units.size(size)}: {units.duration(time_s)} measured" for size, time_s in points]
    lines = [Line(label="", css="measured", points=points, titles=titles)]
    if curve:
        lines.insert(0, Line(label="fitted", css="c-1", points=curve))
    return line_chart(
        lines,
        x=Axis.around(sizes),
        y=Axis.around([time_s for _, time_s in (*points, *curve)]),
        x_text=lambda size: units.trimmed(units.size(size)),
        y_text=lambda seconds: units.trimmed(units.duration(seconds)),
        title="Time of an all-reduce",
        x_title="Message size",
        about="Time of an all-reduce against its size: "
        f"{len(points)} measured points and the fitted curve",
    )
