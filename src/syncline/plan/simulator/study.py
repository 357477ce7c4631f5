"""A whole what-if: its points, where they cross, and what limits one of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from syncline.errors import UserError
from syncline.plan.collective_costs import SERVER_ALGORITHMS
from syncline.plan.simulator.bottleneck import bottleneck
from syncline.plan.simulator.whatif import Change, WhatIfSimulator
from syncline.plan.whatif import BOUND_SHARE, Crossing, Point, WhatIf

SweepAxis = Literal["workers", "bandwidth_bytes_per_s"]
AXES: tuple[SweepAxis, ...] = ("workers", "bandwidth_bytes_per_s")
NOTICEABLE = 1e-3
"""Smallest relative difference of iteration times for which one planner counts as faster."""


def series(points: Sequence[Point], axis: str) -> list[list[int]]:
    """Return groups of points, as indices, that differ only along an axis; sorted along it."""
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
    """Return where the fastest planner changes and where one becomes communication-bound or not."""
    found: list[Crossing] = []
    for axis in AXES:
        for indices in series(points, axis):
            found += _overtakings(points, indices, axis)
            found += _turns(points, indices, axis)
    return tuple(found)


def _overtakings(
    points: Sequence[Point], indices: Sequence[int], axis: SweepAxis
) -> Iterator[Crossing]:
    leader = points[indices[0]].best.planner
    for pair in itertools.pairwise(indices):
        was, now = (points[index] for index in pair)
        best, led = now.best, now.of(leader)
        if led.iteration_s <= best.iteration_s * (1 + NOTICEABLE):
            continue
        gap_before = math.log(was.of(best.planner).iteration_s / was.of(leader).iteration_s)
        gap_after = math.log(best.iteration_s / led.iteration_s)
        yield _crossing(
            points, pair, axis, (gap_before, gap_after), best.planner, "overtakes", leader
        )
        leader = best.planner


def _turns(points: Sequence[Point], indices: Sequence[int], axis: SweepAxis) -> Iterator[Crossing]:
    for planner in (prediction.planner for prediction in points[indices[0]].predictions):
        for pair in itertools.pairwise(indices):
            found = (points[index].of(planner) for index in pair)
            # The exposed share of an iteration, if that takes any time.
            shares = (p.exposed_s / p.iteration_s if p.iteration_s > 0 else 0.0 for p in found)
            before, after = (share - BOUND_SHARE for share in shares)
            if before < 0 <= after:
                yield _crossing(points, pair, axis, (before, after), planner, "communication-bound")
            elif after < 0 <= before:
                yield _crossing(points, pair, axis, (before, after), planner, "compute-bound")


def _crossing(
    points: Sequence[Point],
    pair: tuple[int, int],
    axis: SweepAxis,
    values: tuple[float, float],
    planner: str,
    kind: Literal["overtakes", "communication-bound", "compute-bound"],
    other: str | None = None,
) -> Crossing:
    """Return the crossing where the line through two values of opposite sign is 0."""
    low, high = (float(getattr(points[index].setting, axis)) for index in pair)
    span = values[0] - values[1]
    share = min(max(values[0] / span, 0.0), 1.0) if span else 0.5
    return Crossing(
        axis=axis,
        point=pair[1],
        before=low,
        after=high,
        at=low * (high / low) ** share,
        planner=planner,
        kind=kind,
        other=other,
    )


def study(
    simulator: WhatIfSimulator,
    points: Sequence[Change],
    *,
    model: str,
    chosen: int | None = None,
    notes: Iterable[str] = (),
    track: Callable[[Sequence[Change]], Iterable[Change]] = iter,
) -> WhatIf:
    """Simulate a sweep of at least one point of a model.

    ``chosen`` is the index of the point whose limit is described, by default the first with the
    most workers. ``track`` wraps the points, so that a progress bar can follow the sweep.
    """
    if chosen is not None and not 0 <= chosen < len(points):
        raise UserError(
            f"there is no point {chosen + 1}; the sweep has {len(points)} "
            f"point{'' if len(points) == 1 else 's'}, numbered from 1"
        )
    made = tuple(simulator.point(change) for change in track(points))
    index = chosen
    if index is None:
        index = max(range(len(made)), key=lambda i: made[i].setting.workers)  # the first of them
    return WhatIf(
        model=model,
        network=simulator.network.name,
        points=made,
        crossings=crossings(made),
        bottleneck=bottleneck(
            simulator, points[index], made[index], index, made[index].best.planner
        ),
        notes=(*notes, *_left_out(points, simulator)),
    )


def _left_out(points: Sequence[Change], simulator: WhatIfSimulator) -> Iterable[str]:
    network = simulator.network
    if any((change.jobs or network.jobs) > 1 for change in points):
        yield (
            "Jobs that share the links are alike, and planned as if each had the links to itself; "
            "iteration times are means over the offsets between the jobs."
        )
    if any(change.wire is not None for change in points):
        yield (
            "Converting gradients to and from the type in which they travel is not included, nor "
            "is the effect of the lower precision."
        )
    sparse = network.density is not None or any(change.density is not None for change in points)
    if sparse and network.sparse is None:
        yield "Selecting and merging the elements of a sparse exchange is not included."
    served = any(change.strategy.exchange == "parameter-server" for change in points)
    if served and network.algorithm not in ("ring", *SERVER_ALGORITHMS):
        yield f"With a parameter server the network's {network.algorithm} is not used."
    if served and simulator.profile_at(points[0]).norm is not None:
        yield "With a parameter server no norm of the gradients is exchanged."
    if any(change.compute_scale != 1 for change in points):
        yield "A compute scale leaves reading, copying and the host's launching as they are."
