"""A panel of a what-if: the points along one axis, and the planners as lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.model.whatif import Crossing, Point, WhatIf
from syncline.report.whatif_words import setting_text, value_text

__all__ = ["Group", "Panel", "coloured"]

ALIKE = 0.005
"""Planners whose iterations differ by less than this share everywhere are one line."""
COLOURS = 6
NAMED = 5
"""Planners with a colour where there are more than colours, if no more of them lead."""
TINY_S = 1e-9
STOCK = "ddp"


@dataclass(frozen=True, slots=True)
class Group:
    """Planners that are one line."""

    planners: tuple[str, ...]
    css: str
    """Class of its colour; ``pale`` for none of its own."""

    @property
    def label(self) -> str:
        """A short name."""
        rest = len(self.planners) - 1
        return f"{self.planners[0]} +{rest}" if rest else self.planners[0]

    @property
    def names(self) -> str:
        """All of them."""
        return ", ".join(self.planners)


@dataclass(frozen=True, slots=True)
class Panel:
    """Points that differ along one axis only."""

    what_if: WhatIf
    axis: str
    indices: Sequence[int]
    """Of the points, in the order of the axis."""

    @property
    def points(self) -> list[Point]:
        """The points, in the order of the axis."""
        return [self.what_if.points[index] for index in self.indices]

    @property
    def values(self) -> list[float]:
        """Where the points lie on the axis."""
        return [float(getattr(point.setting, self.axis)) for point in self.points]

    @property
    def title(self) -> str:
        """What the points have in common, of what differs elsewhere."""
        others = [field for field in self.what_if.swept if field != self.axis]
        return setting_text(self.points[0].setting, others)

    @property
    def axis_title(self) -> str:
        """What the axis shows."""
        return "workers" if self.axis == "workers" else "bandwidth, Gbit/s"

    def tick_text(self, value: float) -> str:
        """Return a value of the axis as its ticks say it."""
        return f"{value if self.axis == 'workers' else value * 8e-9:g}"

    def value_text(self, value: float) -> str:
        """Return a value of the axis as people read it."""
        return value_text(self.axis, round(value) if self.axis == "workers" else value)

    def crossings(self) -> list[Crossing]:
        """Return the crossings on this panel of planners that lead somewhere, in order."""
        leaders = self._leaders()
        mine = [
            crossing
            for crossing in self.what_if.crossings
            if crossing.axis == self.axis
            and crossing.point in self.indices
            and crossing.planner in leaders
        ]
        return sorted(mine, key=lambda c: (c.at, c.kind, c.planner))

    def groups(self) -> list[Group]:
        """Return the planners in lines, the fastest in the end first."""
        points, colours = self.points, coloured(self.what_if)
        by_speed = sorted(points[-1].predictions, key=lambda p: (p.iteration_s, p.messages))
        gathered: list[list[str]] = []
        for planner in (prediction.planner for prediction in by_speed):
            twin = next((g for g in gathered if _alike(points, g[0], planner)), None)
            if twin is None:
                gathered.append([planner])
            else:
                twin.append(planner)
        found = []
        for members in gathered:
            members.sort(key=lambda planner: colours.get(planner, "pale"))
            found.append(Group(tuple(members), colours.get(members[0], "pale")))
        return found

    def _leaders(self) -> set[str]:
        return {point.best.planner for point in self.points}


def coloured(what_if: WhatIf) -> dict[str, str]:
    """Return the class of the colour of planners that have one: the same in every panel.

    Of more planners than colours, those that lead at most points, stock DDP, and those that are
    fastest on average.
    """
    points = what_if.points
    leads = Counter(point.best.planner for point in points)

    def rank(planner: str) -> tuple[bool, int, float]:
        wanted = planner in leads or planner == STOCK
        behind = math.fsum(
            math.log(
                max(point.of(planner).iteration_s, TINY_S) / max(point.best.iteration_s, TINY_S)
            )
            for point in points
        )
        return not wanted, -leads[planner], behind

    ranked = sorted(what_if.planners, key=rank)
    few = ranked if len(ranked) <= COLOURS else ranked[:NAMED]
    named = [p for p in ranked[:COLOURS] if p in few or p in leads or p == STOCK]
    return {planner: f"c-{index}" for index, planner in enumerate(named)}


def _alike(points: Sequence[Point], one: str, other: str) -> bool:
    return all(
        math.isclose(point.of(one).iteration_s, point.of(other).iteration_s, rel_tol=ALIKE)
        for point in points
    )
