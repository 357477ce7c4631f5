"""Where a sweep turns: one planner overtakes another, computing gives way to communication.

Points that differ in nothing but the worker count (or the bandwidth) form a series. Between two
neighbours of a series something crosses where a difference changes its sign.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from syncline.model.prediction import Prediction
from syncline.model.whatif import BOUND_SHARE, Crossing, Point

__all__ = ["AXES", "crossings", "series"]

Axis = Literal["workers", "bandwidth_bytes_per_s"]
AXES: tuple[Axis, ...] = ("workers", "bandwidth_bytes_per_s")
NOTICEABLE = 1e-3
"""Relative difference of iteration times from which on one planner is faster than another."""


def series(points: Sequence[Point], axis: str) -> list[list[int]]:
    """Return the indices of points that differ only along an axis, in the order of its values.

    Series of a single point are left out.
    """
    groups: dict[object, list[int]] = {}
    for index, point in enumerate(points):
        others = msgspec.structs.astuple(msgspec.structs.replace(point.setting, **{axis: 1}))
        if getattr(point.setting, axis) is not None:
            groups.setdefault(others, []).append(index)
    return [
        sorted(group, key=lambda index: float(getattr(points[index].setting, axis)))
        for group in groups.values()
        if len(group) > 1
    ]


def crossings(points: Sequence[Point]) -> tuple[Crossing, ...]:
    """Return every change of the fastest planner, and each planner's turn to or from the network.

    Along worker counts and bandwidths. Whoever was the fastest stays it until another is faster by
    a thousandth.
    """
    found: list[Crossing] = []
    for axis in AXES:
        for indices in series(points, axis):
            found += _overtakings(points, indices, axis)
            found += _turns(points, indices, axis)
    return tuple(found)


def _overtakings(points: Sequence[Point], indices: Sequence[int], axis: Axis) -> Iterator[Crossing]:
    leader = points[indices[0]].best.planner
    for before, after in itertools.pairwise(indices):
        best, led = points[after].best, points[after].of(leader)
        if led.iteration_s <= best.iteration_s * (1 + NOTICEABLE):
            continue
        was = points[before]
        gap_before = math.log(was.of(best.planner).iteration_s / was.of(leader).iteration_s)
        gap_after = math.log(best.iteration_s / led.iteration_s)
        yield _crossing(
            points, before, after, axis, (gap_before, gap_after), best.planner, "overtakes", leader
        )
        leader = best.planner


def _turns(points: Sequence[Point], indices: Sequence[int], axis: Axis) -> Iterator[Crossing]:
    for prediction in points[indices[0]].predictions:
        planner = prediction.planner
        for before, after in itertools.pairwise(indices):
            excess = (
                _exposed_share(points[before].of(planner)) - BOUND_SHARE,
                _exposed_share(points[after].of(planner)) - BOUND_SHARE,
            )
            if (excess[0] < 0) != (excess[1] < 0):
                kind: Literal["communication-bound", "compute-bound"] = (
                    "communication-bound" if excess[0] < 0 else "compute-bound"
                )
                yield _crossing(points, before, after, axis, excess, planner, kind)


def _exposed_share(prediction: Prediction) -> float:
    return prediction.exposed_s / prediction.iteration_s if prediction.iteration_s > 0 else 0.0


def _crossing(
    points: Sequence[Point],
    before: int,
    after: int,
    axis: Axis,
    values: tuple[float, float],
    planner: str,
    kind: Literal["overtakes", "communication-bound", "compute-bound"],
    other: str | None = None,
) -> Crossing:
    """Return the crossing where the line through two values of opposite sign is 0."""
    low = float(getattr(points[before].setting, axis))
    high = float(getattr(points[after].setting, axis))
    span = values[0] - values[1]
    share = min(max(values[0] / span, 0.0), 1.0) if span else 0.5
    return Crossing(
        axis=axis,
        point=after,
        before=low,
        after=high,
        at=low * (high / low) ** share,
        planner=planner,
        kind=kind,
        other=other,
    )
