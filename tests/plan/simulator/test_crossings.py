"""Crossings: who overtakes whom, and where communication begins to show."""

from __future__ import annotations

import pytest

from syncline.plan.simulator.study import crossings, series
from syncline.plan.whatif import Crossing, Point, Setting
from tests.plan.documents import prediction

COMPUTING_S = 0.1


def point(workers: int, bandwidth_gbit_s: float | None = None, **iterations_s: float) -> Point:
    """Return a point at which each planner takes so long."""
    return Point(
        setting=Setting(
            workers=workers,
            algorithm="ring",
            bandwidth_bytes_per_s=None if bandwidth_gbit_s is None else bandwidth_gbit_s * 125e6,
        ),
        network="n",
        alone_s=COMPUTING_S,
        computing_s=COMPUTING_S,
        predictions=tuple(prediction(*each) for each in iterations_s.items()),
    )


def overtakings(*points: Point) -> list[Crossing]:
    return [crossing for crossing in crossings(points) if crossing.kind == "overtakes"]


def test_points_that_differ_along_one_axis_are_a_series() -> None:
    points = [point(w, b, a=0.1) for b in (1, 10) for w in (8, 4, 16)]
    assert series(points, "workers") == [[1, 0, 2], [4, 3, 5]]
    assert series(points, "bandwidth_bytes_per_s") == [[0, 3], [1, 4], [2, 5]]


def test_a_single_point_is_no_series() -> None:
    assert series([point(4, a=0.1)], "workers") == []
    assert series([point(4, a=0.1), point(8, a=0.1)], "bandwidth_bytes_per_s") == []


def test_an_overtaking_lies_where_the_lines_cross() -> None:
    (found,) = overtakings(point(4, a=0.2, b=0.4), point(64, a=0.4, b=0.2))
    assert (found.planner, found.other, found.axis) == ("b", "a", "workers")
    assert (found.point, found.before, found.after) == (1, 4, 64)
    assert found.at == pytest.approx(16)  # the middle, on a logarithmic axis


def test_equals_do_not_overtake() -> None:
    equals = (point(4, a=0.2, b=0.2001), point(8, a=0.2001, b=0.2), point(16, a=0.2, b=0.2))
    assert overtakings(*equals) == []


def test_one_overtakes_after_another() -> None:
    found = overtakings(
        point(2, a=0.2, b=0.3, c=0.4), point(4, a=0.3, b=0.25, c=0.4), point(8, a=0.5, b=0.4, c=0.3)
    )
    assert [(c.planner, c.other, c.point) for c in found] == [("b", "a", 1), ("c", "b", 2)]


def test_the_turn_to_communication_and_back() -> None:
    points = [point(2, a=0.101), point(4, a=0.12), point(8, a=0.1), point(16, a=0.1)]
    found = crossings(points)
    assert [(c.kind, c.point) for c in found] == [("communication-bound", 1), ("compute-bound", 2)]
    assert all(2 < c.at < 8 for c in found)


def test_more_bandwidth_turns_to_computing() -> None:
    points = [point(4, 25, a=0.1), point(4, 1, a=0.2)]
    (found,) = crossings(points)
    assert (found.kind, found.axis, found.point) == ("compute-bound", "bandwidth_bytes_per_s", 0)
    assert found.before == 125e6
    assert found.before < found.at < found.after
