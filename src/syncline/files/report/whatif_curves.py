"""The curves of a what-if: speed-up, efficiency, exposed communication, and where time goes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from syncline.files.report import units
from syncline.files.report.chart import Axis, Bar, Line, Mark, bar_chart, line_chart
from syncline.files.report.markup import Html, folded, legend, note, section, tag, typeset
from syncline.files.report.verdict import DDP
from syncline.files.report.whatif_words import (
    PARTS,
    REFERENCE,
    crossing_text,
    setting_text,
    value_text,
)
from syncline.plan.prediction import Prediction
from syncline.plan.simulator.study import series
from syncline.plan.whatif import BOUND_SHARE, Crossing, Point, WhatIf

ALIKE = 0.005  # planners whose iterations differ by less than this share everywhere are one line
COLOURS = 6
TINY_S = 1e-9


class PlannerGroup(NamedTuple):
    """Planners that are drawn as one line."""

    planners: tuple[str, ...]
    css: str  # class of its colour; ``pale`` for none of its own

    @property
    def names(self) -> str:
        """All of them."""
        return ", ".join(self.planners)


@dataclass(frozen=True)
class Panel:
    """Points that differ along one axis only."""

    what_if: WhatIf
    axis: str
    indices: Sequence[int]  # indices of the points, in the order of the axis

    @cached_property
    def points(self) -> list[Point]:
        """The points, in the order of the axis."""
        return [self.what_if.points[index] for index in self.indices]

    @cached_property
    def values(self) -> list[float]:
        """The points' values on the axis."""
        return [float(getattr(point.setting, self.axis)) for point in self.points]

    @property
    def title(self) -> str:
        """The swept settings that these points share."""
        others = [field for field in self.what_if.swept if field != self.axis]
        return setting_text(self.points[0].setting, others)

    @property
    def axis_title(self) -> str:
        """What the axis shows."""
        return "workers" if self.axis == "workers" else "bandwidth, Gbit/s"

    def tick_text(self, value: float) -> str:
        """Return the label of a tick."""
        return f"{value if self.axis == 'workers' else value * 8e-9:g}"

    @cached_property
    def crossings(self) -> list[Crossing]:
        """Crossings on this panel of planners that lead at one of its points, in order."""
        leaders = {point.best.planner for point in self.points}
        mine = (
            c
            for c in self.what_if.crossings
            if c.axis == self.axis and c.point in self.indices and c.planner in leaders
        )
        return sorted(mine, key=lambda c: (c.at, c.kind, c.planner))

    @cached_property
    def groups(self) -> list[PlannerGroup]:
        """The planners grouped into lines; the fastest at the last point comes first."""
        points, colours = self.points, coloured(self.what_if)
        by_speed = sorted(points[-1].predictions, key=lambda p: (p.iteration_s, p.messages))
        gathered: list[list[str]] = []

        def alike(one: str, other: str) -> bool:
            pairs = ((point.of(one).iteration_s, point.of(other).iteration_s) for point in points)
            return all(math.isclose(a, b, rel_tol=ALIKE) for a, b in pairs)

        for planner in (prediction.planner for prediction in by_speed):
            group = next((g for g in gathered if alike(g[0], planner)), [])
            if not group:
                gathered.append(group)
            group.append(planner)
        for group in gathered:
            group.sort(key=lambda planner: colours.get(planner, "pale"))
        return [PlannerGroup(tuple(g), colours.get(g[0], "pale")) for g in gathered]


def coloured(what_if: WhatIf) -> dict[str, str]:
    """Return the class of the colour of each planner that has one, the same in every panel.

    They go first to planners that lead at most points, to DDP, and to those fastest on average.
    """
    points = what_if.points
    leads = Counter(point.best.planner for point in points)

    def rank(planner: str) -> tuple[bool, int, float]:
        wanted = planner in leads or planner == DDP
        times_s = ((point.of(planner).iteration_s, point.best.iteration_s) for point in points)
        ratios = (max(own_s, TINY_S) / max(best_s, TINY_S) for own_s, best_s in times_s)
        return not wanted, -leads[planner], math.fsum(map(math.log, ratios))

    named = sorted(what_if.planners, key=rank)[:COLOURS]
    return {planner: f"c-{index}" for index, planner in enumerate(named)}


MOST_PANELS = 12
TITLES = {"workers": "Scaling with workers", "bandwidth_bytes_per_s": "What bandwidth buys"}
EXPLAINED = (
    " Above the dashed line, exposed communication is 5 % of the iteration or more. Planners whose "
    "iterations differ by less than 0.5 % everywhere share a line."
)


def curves_section(what_if: WhatIf, axis: str) -> Html | None:
    """Return the section with the curves along an axis, or None where it was not swept."""
    panels = [Panel(what_if, axis, indices) for indices in series(what_if.points, axis)]
    if not panels:
        return None
    panels.sort(key=lambda panel: what_if.bottleneck.point not in panel.indices)
    unfolded, left_out = panels[1:MOST_PANELS], len(panels[MOST_PANELS:])
    return section(
        f"{axis.partition('_')[0]}-curves",
        TITLES[axis],
        note(panels[0].title) if panels[0].title else None,
        _panel(panels[0]),
        note(typeset(REFERENCE + EXPLAINED)),
        [folded(panel.title, _panel(panel), css="panel-of") for panel in unfolded],
        note(f"{units.counted(left_out, 'more combination')}: what-if.json.") if left_out else None,
    )


def _panel(panel: Panel) -> list[Html | None]:
    first = _speed_up if panel.axis == "workers" else _iteration
    charts = (first(panel), _efficiency(panel), _exposed(panel), _parts(panel))
    sentences = (crossing_text(crossing) for crossing in panel.crossings)
    listed = [tag("li", typeset(text[0].upper() + text[1:] + ".")) for text in sentences]
    entries = [(group.css, group.names) for group in panel.groups if group.css != "pale"]
    if pale := ", ".join(group.names for group in panel.groups if group.css == "pale"):
        entries.append(("pale", pale))
    return [
        legend(entries, "stroke"),
        tag("div", charts, class_="charts"),
        tag("ol", listed, class_="crossings") if listed else None,
    ]


# --- the charts ---


def _lines(panel: Panel, figure: Callable[[Point, Prediction], float]) -> list[Line]:
    """Return one line per group; pale and slow lines are drawn below the others."""
    lines = []
    slowest_first = panel.groups[::-1]
    for group in sorted(slowest_first, key=lambda g: g.css != "pale"):
        first, *others = group.planners
        label, points, titles = f"{first} +{len(others)}" if others else first, [], []
        for value, point in zip(panel.values, panel.points, strict=True):
            prediction = point.of(first)
            points.append((value, figure(point, prediction)))
            titles.append(
                f"{group.names} at {value_text(panel.axis, value)}: "
                f"{units.duration(prediction.iteration_s)}, of which "
                f"{units.duration(prediction.exposed_s)} exposed, efficiency "
                f"{units.percent(point.efficiency(prediction))}"
            )
        if group.css == "pale":
            label, titles = "", []
        lines.append(Line(label=label, css=group.css, points=points, titles=titles))
    return lines


def _shown_values(lines: Sequence[Line]) -> list[float]:
    """Return the values that the axis must show; pale lines may leave it."""
    return [y for line in lines if line.css != "pale" for _, y in line.points]


def _chart(
    panel: Panel,
    lines: Sequence[Line],
    *,
    y: Axis,
    y_text: Callable[[float], str],
    title: str,
    marks: Sequence[Mark] = (),
) -> Html:
    return line_chart(
        lines,
        x=Axis.of(panel.values),
        y=y,
        x_text=panel.tick_text,
        y_text=y_text,
        title=title,
        x_title=panel.axis_title,
        about=f"{title} against {panel.axis_title}. {_about(panel)}",
        marks=marks,
    )


def _speed_up(panel: Panel) -> Html:
    ideal = Line(label="ideal", css="ideal", points=[(v, v) for v in panel.values])
    lines = [ideal, *_lines(panel, lambda point, p: max(point.speed_up(p), 1e-9))]
    y = Axis.around(_shown_values(lines))
    return _chart(panel, lines, y=y, y_text=lambda v: f"{v:g}", title="Speed-up")


def _iteration(panel: Panel) -> Html:
    lines = _lines(panel, lambda _, p: max(p.iteration_s, 1e-9))
    y = Axis.around(_shown_values(lines))
    return _chart(panel, lines, y=y, y_text=_duration, title="Iteration")


def _efficiency(panel: Panel) -> Html:
    lines = _lines(panel, lambda point, p: point.efficiency(p))
    top = max(1.0, math.ceil(max(_shown_values(lines)) * 4) / 4)
    return _chart(
        panel,
        lines,
        y=Axis(0.0, top, [top * step / 4 for step in range(5)]),
        y_text=lambda value: f"{value * 100:.0f}\u00a0%",
        title="Efficiency",
        marks=_marks(panel, lambda c: _between(panel, c), overtakes=True),
    )


def _marks(panel: Panel, y: Callable[[Crossing], float], *, overtakes: bool) -> list[Mark]:
    """Return the marks of the crossings of one kind, with their numbers in the list of all."""
    return [
        Mark(number=number, x=crossing.at, y=y(crossing), title=crossing_text(crossing))
        for number, crossing in enumerate(panel.crossings, start=1)
        if (crossing.kind == "overtakes") is overtakes
    ]


def _between(panel: Panel, crossing: Crossing) -> float:
    """Return the efficiency of a crossing's planner where the crossing lies."""
    found = dict(zip(panel.values, panel.points, strict=True))
    ends = (found[crossing.before], found[crossing.after])
    low, high = (point.efficiency(point.of(crossing.planner)) for point in ends)
    share = math.log(crossing.at / crossing.before) / math.log(crossing.after / crossing.before)
    return low + (high - low) * share


def _exposed(panel: Panel) -> Html:
    # Exposed seconds that are 5 % of an iteration.
    computing_s = (max(p.computation_s for p in point.predictions) for point in panel.points)
    limit = [seconds * BOUND_SHARE / (1 - BOUND_SHARE) for seconds in computing_s]
    floor_s = 10.0 ** math.floor(math.log10(max(*limit, 1e-8) / 20))
    bound = Line(label="5 %", css="ideal", points=list(zip(panel.values, limit, strict=True)))
    lines = [bound, *_lines(panel, lambda _, p: max(p.exposed_s, floor_s))]
    return _chart(
        panel,
        lines,
        y=Axis.around([floor_s, *_shown_values(lines)]),
        y_text=lambda value: ("\u2264\u00a0" if value < floor_s * 1.01 else "") + _duration(value),
        title="Exposed communication",
        marks=_marks(panel, lambda c: limit[panel.values.index(c.before)], overtakes=False),
    )


def _parts(panel: Panel) -> Html:
    """Return the four parts of the fastest planner's iteration as stacked bars."""
    bars = []
    for value, point in zip(panel.values, panel.points, strict=True):
        split, at = point.split(point.best), value_text(panel.axis, value)
        parts = []
        for field, part in PARTS.items():
            seconds = getattr(split, field)
            text = f"{part.name} at {at}: {units.duration(seconds)}"
            parts.append((part.short, part.css, seconds, text))
        bars.append(Bar(label=panel.tick_text(value), parts=parts))
    return bar_chart(
        bars,
        y_text=_duration,
        title="Where the time of the fastest goes",
        x_title=panel.axis_title,
        about=f"Parts of the iteration against {panel.axis_title}. {_about(panel)}",
    )


def _duration(seconds: float) -> str:
    return "0" if seconds == 0 else units.trimmed(units.duration(seconds))


def _about(panel: Panel) -> str:
    ends = ((panel.values[0], panel.points[0]), (panel.values[-1], panel.points[-1]))
    return " ".join(
        f"At {value_text(panel.axis, value)} {point.best.planner} is the fastest, with "
        f"{units.duration(point.best.iteration_s)} and an efficiency of "
        f"{units.percent(point.efficiency(point.best))}."
        for value, point in ends
    )
