"""Fitting a cost curve to measured points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median_high, median_low
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from syncline.errors import UserError
from syncline.plan.cost import CostCurve, Measurement

HIDDEN_UP_TO_BYTES = 1024 * 1024  # up to this size the latency is a visible part of the cost

MOST_SIZES = 4096
"""Time and memory grow with the square of the number of sizes: 4,096 take some seconds."""
POINTS_PER_SEGMENT = 2  # fewest points that a piece of the curve rests on
KNOWN_BEFOREHAND = 0.15  # relative width of the prior of each of a piece's two parameters
RESOLUTION = 0.01
"""Relative error below which a better fit is noise; it bounds the number of pieces."""
JITTER = 0.05
"""Noise of every time, as a share of the shortest time: the latency varies by that much."""
TAIL_FACTOR = 16
"""Beyond the largest size, the cost per byte is the mean from 1/TAIL_FACTOR of that size on."""
CREDIBLE_GAIN = 0.1
"""Least gain from cutting a large message that counts. A smaller gain is noise or an effect of a
link's buffer; if it counted, a search would cut messages into hundreds of pieces."""


class Fit(NamedTuple):
    """A fitted curve with its relative errors over the points."""

    curve: CostCurve
    error: float  # mean of ``|T(M) / t - 1|``
    error_max: float


def fit_cost_curve(points: Sequence[Measurement]) -> Fit:
    """Fit a piecewise linear curve by relative error, each octave of sizes counting alike.

    No piece falls, but the next may begin lower. The page "Algorithms and costs" has the steps.
    Sizes may be repeated; their (lower) median counts. O(n^2) for n sizes.

    Raises:
        UserError: there are fewer than two sizes or more than 4,096, a size is below 0, or a time
            is not above zero or not finite.
    """
    sizes, measured = _times_by_size(points)
    if len(sizes) > MOST_SIZES:
        raise UserError(
            f"a cost curve is fitted to at most {MOST_SIZES} sizes, found {len(sizes)}; "
            "leave some out"
        )
    times = _without_spikes(sizes, measured)
    octaves = _octaves(sizes)
    curve = _join(sizes, times, octaves, best_pieces(sizes, times, octaves))
    return _with_errors(curve, points)


def curve_through(points: Sequence[Measurement]) -> Fit:
    """Return the curve that is exact at every measured size, and straight between neighbours."""
    sizes, times = _times_by_size(points)
    rates = [
        max((after - before) / (larger - smaller), 0.0)  # no piece falls, but the next may be lower
        for (smaller, larger), (before, after) in zip(
            itertools.pairwise(sizes), itertools.pairwise(times), strict=True
        )
    ]
    rows = list(zip(sizes, times, [*rates, rates[-1]], strict=True))
    if sizes[0]:
        rate = min(rates[0], times[0] / sizes[0])
        rows.insert(0, (0, max(times[0] - rate * sizes[0], 0.0), rate))  # rounding
    curve = _continued(CostCurve.of_rows(_never_below_an_empty_one(rows)), sizes)
    return _with_errors(curve, points)


def _times_by_size(points: Sequence[Measurement]) -> tuple[list[int], list[float]]:
    """Return the sizes, in order, and the (lower) median time of each."""
    repeated: dict[int, list[float]] = {}
    for size, seconds in sorted((p.size_bytes, p.time_s) for p in points):
        if size < 0:
            raise UserError(f"a cost curve needs sizes of at least 0 bytes, found {size}")
        if not (math.isfinite(seconds) and seconds > 0):
            raise UserError(
                f"a cost curve needs measured times above zero, found {seconds} s for {size} bytes"
            )
        repeated.setdefault(size, []).append(seconds)
    if len(repeated) < 2:
        raise UserError("a cost curve needs measurements of at least two sizes")
    return list(repeated), [median_low(several) for several in repeated.values()]


def _with_errors(curve: CostCurve, points: Sequence[Measurement]) -> Fit:
    errors = [abs(curve.seconds(p.size_bytes) / p.time_s - 1) for p in points]
    return Fit(curve, math.fsum(errors) / len(errors), max(errors))


def relative_line(
    sizes: Sequence[int], times: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """Return ``(a, b)``, both at least 0, with the least ``sum(w ((a + b M) / t - 1)^2)``."""
    scale = min(times)  # squares of very short times would underflow
    shares = [(scale / t) ** 2 for t in times]
    if weights is not None:
        shares = [share * weight for share, weight in zip(shares, weights, strict=True)]
    w = math.fsum(shares)
    x = math.fsum(k * m for k, m in zip(shares, sizes, strict=True)) / w
    y = math.fsum(k * t for k, t in zip(shares, times, strict=True)) / w
    spread = math.fsum(k * (m - x) ** 2 for k, m in zip(shares, sizes, strict=True))
    if spread == 0:
        return y, 0.0
    b = math.fsum(k * (m - x) * (t - y) for k, m, t in zip(shares, sizes, times, strict=True))
    b = max(b / spread, 0.0)
    a = y - b * x
    if a < 0:  # the best line through the origin
        squares = math.fsum(k * m * m for k, m in zip(shares, sizes, strict=True))
        products = math.fsum(k * m * t for k, m, t in zip(shares, sizes, times, strict=True))
        return 0.0, products / squares
    return a, b


BURST_SHARE = 0.8
"""A message sent alone was a burst if it took less than this share of its time when messages are
sent back to back; a smaller difference is noise."""
LASTING_BYTES = 128 * 1024
"""Back-to-back messages of at least this size outlast the burst of a token bucket."""


def without_bursts(
    curve: CostCurve, alone: Sequence[Measurement], rows: Sequence[Measurement]
) -> CostCurve:
    """Return the curve with no message faster than the link's rate for back-to-back messages.

    After a pause, a token bucket (of a shaped link, or a cloud's interface) passes a small message
    for free. The curve was fitted to messages ``alone``; ``rows`` are seconds per message sent back
    to back. If a message alone is clearly faster than the fastest row, every message costs at least
    its bytes at that row's rate.
    """
    lasting = [p.time_s / p.size_bytes for p in rows if p.size_bytes >= LASTING_BYTES]
    rate = min(lasting, default=0.0)
    largest_bytes = max(p.size_bytes for p in alone)
    if curve.cheapest_s(largest_bytes) >= BURST_SHARE * rate * largest_bytes:
        return curve
    return curve.at_least(0.0, rate)


def link_line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Return ``(alpha, beta)`` of a link from messages of at least two sizes, in order."""
    a, b = relative_line(sizes, times)
    if a + b * sizes[-1] >= BURST_SHARE * times[-1]:
        return a, b
    return min(times), max((times[-1] - times[-2]) / (sizes[-1] - sizes[-2]), 0.0)


def fit_pipelined(points: Sequence[Measurement], alone: CostCurve) -> CostCurve:
    """Return the cost of a message while another is in flight, for :attr:`Network.pipelined`.

    ``points`` are seconds per message, two at a time without gaps: how long each occupies the
    channel. Cutting a message is assumed to gain nothing, unless pieces are cheaper than the
    largest message by ``CREDIBLE_GAIN``. The hidden latency is the extra time of a message
    ``alone``: the median over the sizes at which it is visible. If a larger message took less time,
    that counts as noise. Beyond the largest size, where latencies no longer matter, a byte costs at
    least what it costs ``alone`` or, if that is less, that size's mean cost per byte.
    """
    occupied = fit_cost_curve(_non_decreasing(points)).curve
    largest_bytes = max(p.size_bytes for p in points)
    cheapest = min(p.time_s / p.size_bytes for p in points if p.size_bytes)
    if cheapest * largest_bytes > occupied.seconds(largest_bytes) * (1 - CREDIBLE_GAIN):
        occupied = occupied.without_gain_from_cutting()
    end_s = occupied.seconds(largest_bytes)
    rate = min(alone.segments[-1].s_per_byte, end_s / largest_bytes)
    if rate > occupied.segments[-1].s_per_byte:
        before = [row for row in occupied.rows() if row[0] < largest_bytes]
        occupied = CostCurve.of_rows([*before, (largest_bytes, end_s, rate)])
    hidden = [
        max(alone.seconds(p.size_bytes) - occupied.seconds(p.size_bytes), 0.0)
        for p in points
        if p.size_bytes <= HIDDEN_UP_TO_BYTES
    ]
    hidden_s = median_high(hidden) if hidden else 0.0
    rows = [(start, hidden_s + cost_s, rate) for start, cost_s, rate in occupied.rows()]
    return CostCurve.of_rows(_with_latency(rows, hidden_s))


def _with_latency(
    rows: Sequence[tuple[int, float, float]], latency_s: float
) -> list[tuple[int, float, float]]:
    """Return (start_bytes, cost_s, s_per_byte) of a curve with another cost of an empty message."""
    (_, cost_s, rate), *others = rows
    one = [] if others and others[0][0] == 1 else [(1, cost_s + rate, rate)]
    return [(0, latency_s, 0.0), *one, *others]


def _non_decreasing(points: Sequence[Measurement]) -> list[Measurement]:
    """Return the points after isotonic regression: times out of order become their median."""
    ordered = sorted(points, key=lambda point: point.size_bytes)
    pools: list[list[float]] = []  # the value of each is its lower median
    for point in ordered:
        pool = [point.time_s]
        while pools and median_low(pools[-1]) > median_low(pool):
            pool = pools.pop() + pool
        pools.append(pool)
    times = (median_low(pool) for pool in pools for _ in pool)
    return [
        msgspec.structs.replace(point, time_s=seconds)
        for point, seconds in zip(ordered, times, strict=True)
    ]


def _without_spikes(sizes: Sequence[int], times: Sequence[float]) -> list[float]:
    """Return the times, with each isolated outlier replaced by the nearer neighbour's time.

    An outlier is above both neighbours or below both, and on no line with a, b >= 0 through one.
    """
    found = list(times)
    for i in range(1, len(times) - 1):
        before, own, after = times[i - 1 : i + 2]
        slow = own > after and own * sizes[i - 1] > before * sizes[i]
        fast = own < before and after * sizes[i] > own * sizes[i + 1]
        if slow or fast:
            found[i] = max(before, after) if slow else min(before, after)
    return found


def _octaves(sizes: Sequence[int]) -> list[float]:
    """Return each size's weight: its share of the logarithmic scale, 1 on average."""
    places = [math.log1p(size) for size in sizes]
    gaps = [larger - smaller for smaller, larger in itertools.pairwise(places)]
    # Sizes that differ by less than rounding keep a weight.
    own = [max(sum(pair), 1e-9) for pair in zip([gaps[0], *gaps], [*gaps, gaps[-1]], strict=True)]
    mean = math.fsum(own) / len(own)
    return [each / mean for each in own]


def best_pieces(
    sizes: Sequence[int], times: Sequence[float], weights: Sequence[float]
) -> list[int]:
    """Return the index of the first point of each piece."""
    count = len(sizes)
    squared = _squared_errors(sizes, times, weights)
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    # The penalty for a piece's two parameters: the width of their prior, and log(n) each, as in the
    # Bayesian information criterion.
    per_piece = 4 * math.log(KNOWN_BEFOREHAND) + 2 * math.log(count)
    # best[j]: the criterion of the first j points; last[j]: where the last of their pieces begins.
    best = np.full(count + 1, math.inf)
    best[0] = 0.0
    last = np.zeros(count + 1, dtype=np.intp)
    for j in range(POINTS_PER_SEGMENT, count + 1):
        until = j - POINTS_PER_SEGMENT + 1
        own = _unlikelihood(
            squared[:until, j], sums[j] - sums[:until], j - np.arange(until, dtype=np.float64)
        )
        ways = best[:until] + own + per_piece
        last[j] = ways.argmin()
        best[j] = ways[last[j]]
    starts: list[int] = []
    j = count
    while j:
        j = int(last[j])
        starts.append(j)
    return starts[::-1]


def _unlikelihood(
    squared: NDArray[np.float64], weight: NDArray[np.float64], lengths: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return -2 times the logarithm of each piece's likelihood, integrated over its line.

    ``squared`` are weighted squared errors, and ``weight`` the sums of the points' weights. Every
    piece has noise of its own. Points with more than an average weight count for more.
    """
    freedom = lengths - 2
    noise = np.maximum(squared / weight * lengths / np.maximum(freedom, 1), RESOLUTION**2)
    counted = freedom * np.maximum(weight / lengths, 1.0)
    found: NDArray[np.float64] = counted * np.log(noise)
    return found


def _squared_errors(
    sizes: Sequence[int], times: Sequence[float], weights: Sequence[float]
) -> NDArray[np.float64]:
    """Return, for points i to j - 1, the squared error of their :func:`relative_line`.

    Of shape (n, n + 1); infinite where there are fewer than two points. Sizes are relative to that
    of point i, which keeps the difference of two sums accurate.
    """
    count = len(sizes)
    m = np.array(sizes, dtype=np.int64)
    t = np.array(times) / min(times)
    w = np.array(weights)
    k = w / t**2
    cost = np.full((count, count + 1), math.inf)
    for i in range(count - POINTS_PER_SEGMENT + 1):
        x = (m[i:] - m[i]).astype(np.float64)
        own, seconds, first = k[i:], t[i:], float(m[i])
        s0, sx, sxx = np.cumsum(own), np.cumsum(own * x), np.cumsum(own * x * x)
        st, sxt = np.cumsum(own * seconds), np.cumsum(own * x * seconds)
        spread = np.maximum(sxx - sx * sx / s0, np.finfo(np.float64).tiny)
        slope = np.maximum((sxt - sx * st / s0) / spread, 0.0)
        begin = (st - slope * sx) / s0  # at the size of point i
        # Where the line would be below 0 at 0 bytes, take the best line through the origin.
        squares = sxx + 2 * first * sx + first**2 * s0
        origin = (sxt + first * st) / np.maximum(squares, np.finfo(np.float64).tiny)
        below = begin < slope * first
        slope = np.where(below, origin, slope)
        begin = np.where(below, origin * first, begin)
        squared = (
            begin * (begin * s0 + 2 * slope * sx - 2 * st)
            + slope * (slope * sxx - 2 * sxt)
            + np.cumsum(w[i:])
        )
        stops = slice(i + POINTS_PER_SEGMENT, count + 1)
        cost[i, stops] = np.maximum(squared[POINTS_PER_SEGMENT - 1 :], 0.0)
    return cost


def _join(
    sizes: Sequence[int], times: Sequence[float], octaves: Sequence[float], starts: Sequence[int]
) -> CostCurve:
    """Build the curve of the pieces that begin at these points, and continue it after the last."""
    rows: list[tuple[int, float, float]] = []
    jitter_s = min(times) * JITTER
    weights = [
        w / (RESOLUTION**2 + (jitter_s / t) ** 2) for w, t in zip(octaves, times, strict=True)
    ]
    for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True):
        own = slice(start, stop)
        a, b = relative_line(sizes[own], times[own], weights[own])
        begin_bytes = 0
        if rows:
            # Between the last point of one piece and the first of the next, switch in the middle
            # on the logarithmic scale on which the points were chosen.
            begin_bytes = math.isqrt(max(sizes[start - 1], 1) * sizes[start])
            begin_bytes = min(max(begin_bytes, sizes[start - 1] + 1), sizes[start])
        rows.append((begin_bytes, a + b * begin_bytes, b))
    return _continued(CostCurve.of_rows(_never_below_an_empty_one(rows)), sizes)


def _never_below_an_empty_one(
    rows: Sequence[tuple[int, float, float]],
) -> Sequence[tuple[int, float, float]]:
    """Return the rows of a curve on which no message costs less than an empty one."""
    least_s = min(cost_s for _, cost_s, _ in rows)
    return _with_latency(rows, least_s) if least_s < rows[0][1] else rows


def _continued(curve: CostCurve, sizes: Sequence[int]) -> CostCurve:
    """Return the curve, continued beyond the largest size at the mean cost per byte of its end."""
    last = sizes[-1]
    first = next(size for size in sizes if size * TAIL_FACTOR >= last)
    before, end = curve.segments[-1], curve.seconds(last)
    if first == last or first >= before.start_bytes:
        return curve
    rate = (end - curve.seconds(first)) / (last - first)
    if rate <= 0:  # the curve fell there: only the piece after the fall says what follows
        return curve
    return CostCurve.of_rows([*(row for row in curve.rows() if row[0] < last), (last, end, rate)])
