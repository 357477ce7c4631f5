"""Fitting a cost curve to measured points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from syncline.errors import UserError
from syncline.model.cost import CostCurve, CostSegment
from syncline.model.network import Measurement

HIDDEN_UP_TO_BYTES = 1024 * 1024
"""Up to this size the startup is a visible part of the cost."""

__all__ = ["Fit", "fit_cost_curve", "fit_pipelined", "relative_line"]

POINTS_PER_SEGMENT = 2
"""Fewest points that a piece of the curve rests on."""
RESOLUTION = 0.01
"""Relative error below which a better fit is noise: keeps the number of pieces finite."""
CREDIBLE_GAIN = 0.1
"""Least gain from cutting a large message that counts. Less is noise, or an effect of a link's
buffer, and a search would cut messages into hundreds of pieces for it."""


class Fit(NamedTuple):
    """A fitted curve with its relative errors over the points."""

    curve: CostCurve
    error: float
    """Mean of ``|T(M) / t - 1|``."""
    error_max: float


def fit_cost_curve(points: Sequence[Measurement]) -> Fit:
    """Fit a non-decreasing piecewise linear curve, by relative error.

    A library switches algorithm at certain sizes, so an all-reduce is no straight line over six
    decades; and least squares of seconds would let the largest message decide alone. The pieces
    are lines of least squared *relative* error; where they begin is found exactly by dynamic
    programming over the points, and how many there are by the Bayesian information criterion.

    Sizes may be repeated. O(n^3) for n points.

    Raises:
        UserError: there are fewer than two sizes, or a time is not above zero or not finite.
    """
    ordered = sorted(points, key=lambda p: p.size_bytes)
    sizes = [p.size_bytes for p in ordered]
    measured = [p.time_s for p in ordered]
    if len(set(sizes)) < 2:
        raise UserError("a cost curve needs measurements of at least two sizes")
    for size, seconds in zip(sizes, measured, strict=True):
        if not (math.isfinite(seconds) and seconds > 0):
            raise UserError(
                f"a cost curve needs measured times above zero, found {seconds} s for {size} bytes"
            )
    times = _non_decreasing(measured)
    starts = _best_pieces(sizes, times)
    curve = _join(sizes, times, starts)
    errors = [abs(curve.seconds(m) / t - 1) for m, t in zip(sizes, measured, strict=True)]
    return Fit(curve, math.fsum(errors) / len(errors), max(errors))


def relative_line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Return ``(a, b)``, both at least 0, with the least ``sum(((a + b M) / t - 1)^2)``."""
    weights = [1 / t**2 for t in times]
    w = math.fsum(weights)
    x = math.fsum(k * m for k, m in zip(weights, sizes, strict=True)) / w
    y = math.fsum(k * t for k, t in zip(weights, times, strict=True)) / w
    spread = math.fsum(k * (m - x) ** 2 for k, m in zip(weights, sizes, strict=True))
    if spread == 0:
        return y, 0.0
    b = math.fsum(k * (m - x) * (t - y) for k, m, t in zip(weights, sizes, times, strict=True))
    b = max(b / spread, 0.0)
    a = y - b * x
    if a < 0:  # the best line through the origin
        squares = math.fsum(k * m * m for k, m in zip(weights, sizes, strict=True))
        products = math.fsum(k * m * t for k, m, t in zip(weights, sizes, times, strict=True))
        return 0.0, products / squares
    return a, b


def fit_pipelined(points: Sequence[Measurement], alone: CostCurve) -> CostCurve:
    """Return the cost of a message beside another, for :attr:`Network.pipelined`.

    With two messages under way and no gaps, the seconds a message are how long it occupies the
    channel. No message is taken to be cheaper in pieces, unless pieces are cheaper than the largest
    by ``CREDIBLE_GAIN``. The extra time of a message alone is the startup that the other message
    hides: its median over the sizes at which the startup is visible.

    ``points`` are seconds a message, of messages two at a time; ``alone`` is the cost of one at a
    time. Errors are those of :func:`fit_cost_curve`.
    """
    occupied = fit_cost_curve(points).curve
    largest_bytes = max(p.size_bytes for p in points)
    cheapest = min(p.time_s / p.size_bytes for p in points if p.size_bytes)
    if cheapest * largest_bytes > occupied.seconds(largest_bytes) * (1 - CREDIBLE_GAIN):
        occupied = occupied.without_gain_from_cutting()
    hidden = sorted(
        max(alone.seconds(p.size_bytes) - occupied.seconds(p.size_bytes), 0.0)
        for p in points
        if p.size_bytes <= HIDDEN_UP_TO_BYTES
    )
    hidden_s = hidden[len(hidden) // 2] if hidden else 0.0
    first, *others = occupied.segments
    rows = [(0, hidden_s, 0.0)]
    if not others or others[0].start_bytes > 1:
        rows.append((1, hidden_s + first.cost_s + first.s_per_byte, first.s_per_byte))
    rows += [(s.start_bytes, hidden_s + s.cost_s, s.s_per_byte) for s in others]
    return CostCurve.of_rows(rows)


def _non_decreasing(times: Sequence[float]) -> list[float]:
    """Return a nearest non-decreasing sequence, in absolute logarithms (isotonic regression).

    A larger message that was measured as faster is noise. Each group of neighbours that is out of
    order takes its (lower) median: a mean would let a single slow measurement lift those after it.
    """
    pools: list[list[float]] = []  # each sorted; its value is its lower median
    for seconds in times:
        pool = [seconds]
        while pools and _lower_median(pools[-1]) > _lower_median(pool):
            pool = sorted(pools.pop() + pool)
        pools.append(pool)
    return [_lower_median(pool) for pool in pools for _ in pool]


def _lower_median(ordered: Sequence[float]) -> float:
    return ordered[(len(ordered) - 1) // 2]


def _best_pieces(sizes: Sequence[int], times: Sequence[float]) -> list[int]:
    """Return the index of the first point of each piece."""
    count = len(sizes)
    cost = [[math.inf] * (count + 1) for _ in range(count)]
    for i in range(count):
        for j in range(i + POINTS_PER_SEGMENT, count + 1):
            if sizes[i] == sizes[j - 1] or (i > 0 and sizes[i] == sizes[i - 1]):
                continue
            a, b = relative_line(sizes[i:j], times[i:j])
            cost[i][j] = math.fsum(
                ((a + b * m) / t - 1) ** 2 for m, t in zip(sizes[i:j], times[i:j], strict=True)
            )
    # best[k][j]: least squared error of the first j points in k pieces, and where the last begins.
    best: list[list[tuple[float, int]]] = [[(math.inf, 0)] * (count + 1)]
    best[0][0] = (0.0, 0)
    for pieces in range(1, count // POINTS_PER_SEGMENT + 1):
        row = [
            min(((best[pieces - 1][i][0] + cost[i][j], i) for i in range(j)), default=(math.inf, 0))
            for j in range(count + 1)
        ]
        best.append(row)

    def criterion(pieces: int) -> float:
        squared = max(best[pieces][count][0], count * RESOLUTION**2)
        return count * math.log(squared / count) + 3 * pieces * math.log(count)

    pieces = min(range(1, len(best)), key=criterion)
    starts: list[int] = []
    j = count
    for k in range(pieces, 0, -1):
        j = best[k][j][1]
        starts.append(j)
    return starts[::-1]


def _join(sizes: Sequence[int], times: Sequence[float], starts: Sequence[int]) -> CostCurve:
    """Build the curve, lifting a piece's beginning where the one before ends higher."""
    segments: list[CostSegment] = []
    for position, start in enumerate(starts):
        stop = starts[position + 1] if position + 1 < len(starts) else len(sizes)
        a, b = relative_line(sizes[start:stop], times[start:stop])
        begin_bytes = 0
        floor_s = 0.0
        if segments:
            # Between the last point of one piece and the first of the next, switch in the middle
            # on the logarithmic scale on which the points were chosen.
            begin_bytes = math.isqrt(max(sizes[start - 1], 1) * sizes[start])
            begin_bytes = min(max(begin_bytes, sizes[start - 1] + 1), sizes[start])
            floor_s = segments[-1].seconds(begin_bytes)
        cost_s = a + b * begin_bytes
        if cost_s < floor_s:
            # Keep the far end where the fit put it.
            end_bytes = sizes[stop - 1]
            end_s = max(a + b * end_bytes, floor_s)
            cost_s = floor_s
            b = (end_s - cost_s) / max(end_bytes - begin_bytes, 1)
        segments.append(CostSegment(start_bytes=begin_bytes, cost_s=cost_s, s_per_byte=b))
    return CostCurve(segments=tuple(segments))
