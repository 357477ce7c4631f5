"""Fitting a curve to measured points: real ones, noisy ones and broken ones."""

from __future__ import annotations

import csv
import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.cost import CostCurve
from syncline.plan.fit import (
    KNOWN_BEFOREHAND,
    RESOLUTION,
    Fit,
    best_pieces,
    curve_through,
    fit_cost_curve,
    fit_pipelined,
    link_line,
    relative_line,
    without_bursts,
)
from syncline.plan.network import Measurement
from tests import strategies as some
from tests.trace_files import TRACES

A100 = TRACES.parent / "allreduce" / "vtrain"
MIB = 1 << 20
Pairs = list[tuple[int, float]]
Fitting = Callable[[list[Measurement]], Fit]


def points(pairs: Pairs) -> list[Measurement]:
    return [Measurement(size_bytes=m, time_s=t, repetitions=1) for m, t in pairs]


def errors(curve: CostCurve, of: list[Measurement]) -> list[float]:
    return [abs(curve.seconds(p.size_bytes) / p.time_s - 1) for p in of]


def fitted(seconds: Callable[[int], float], sizes: list[int]) -> Fit:
    """Return the fit to what messages of these sizes take."""
    return fit_cost_curve(points([(m, seconds(m)) for m in sizes]))


def two_pieces_s(size_bytes: int) -> float:
    """100 us + 1 ns a byte below 256 KiB; above, from 400 us at 0.2 ns a byte."""
    if size_bytes < 256 * 1024:
        return 1e-4 + 1e-9 * size_bytes
    return 4e-4 + 2e-10 * (size_bytes - 256 * 1024)


SIZES = sorted([1024 << k for k in range(17)] + [1536 << k for k in range(16)])


@pytest.mark.parametrize("seed", range(8))
def test_a_curve_of_two_pieces_is_recovered_through_noise(seed: int) -> None:
    noise = random.Random(seed)
    fit = fitted(lambda m: two_pieces_s(m) * noise.uniform(0.97, 1.03), SIZES)
    assert 2 <= len(fit.curve.segments) <= 4
    # The switch lies between the two neighbouring sizes 192 and 256 KiB.
    assert any(192 * 1024 < s.start_bytes <= 256 * 1024 for s in fit.curve.segments)
    without_noise = errors(fit.curve, points([(m, two_pieces_s(m)) for m in SIZES]))
    assert statistics.fmean(without_noise) < 0.015  # half the noise
    assert max(without_noise) < 0.05


@pytest.mark.parametrize("sizes", [SIZES, [0, 10]], ids=["many", "two"])
def test_a_straight_line_stays_one(sizes: list[int]) -> None:
    fit = fitted(lambda m: 1e-4 + 1e-9 * m, sizes)
    [segment] = fit.curve.segments
    assert segment.cost_s == pytest.approx(1e-4)
    assert segment.s_per_byte == pytest.approx(1e-9)
    assert fit.error_max < 1e-9


measured = st.lists(
    st.tuples(st.integers(0, 1 << 32), st.floats(1e-6, 100)), min_size=2, max_size=24
).filter(lambda pairs: len({m for m, _ in pairs}) > 1)


@some.few
@pytest.mark.parametrize("fit", [fit_cost_curve, curve_through])
@given(measured)
def test_no_message_costs_less_than_an_empty_one(fit: Fitting, pairs: Pairs) -> None:
    curve = fit(points(pairs)).curve
    near = {s.start_bytes + d for s in curve.segments for d in (-1, 0, 1)} - {-1}
    beyond = {m << k for m, _ in pairs for k in range(4)}
    for size in beyond | near:
        assert curve.seconds(size) >= curve.latency_s * (1 - 1e-9)


def test_a_curve_falls_where_it_was_measured_to_fall() -> None:
    # A faster algorithm, with a longer latency, from 256 KiB on.
    fit = fitted(lambda m: 1e-4 + 4e-9 * m if m < 256 * 1024 else 3e-4 + 1e-9 * m, SIZES)
    assert fit.error_max < 1e-2
    assert fit.curve.seconds(256 * 1024) < 0.7 * fit.curve.seconds(192 * 1024)


def test_an_empty_message_costs_as_little_as_the_cheapest() -> None:
    curve = fitted(lambda m: 1e-3 if m < 64 * 1024 else 5e-4 + 1e-9 * m, SIZES).curve
    assert curve.seconds(1024) == pytest.approx(1e-3, rel=0.01)
    assert curve.latency_s == min(s.cost_s for s in curve.segments)
    assert curve.latency_s < 6e-4


def stairs_s(size_bytes: int) -> float:
    """A step of 4 ms at every MiB, with hardly a slope between: 4 ns a byte on average."""
    return 1e-3 + 4e-3 * (size_bytes // MIB) + 1e-11 * (size_bytes % MIB)


def test_beyond_the_largest_size_jumps_count() -> None:
    # The last step is long enough to be a piece of its own.
    sizes = sorted({MIB * k // 8 for k in range(1, 64)})
    curve = fitted(stairs_s, sizes).curve
    assert len(curve.segments) > 3
    for size in (16 * MIB, 64 * MIB, 512 * MIB):
        assert curve.seconds(size) == pytest.approx(stairs_s(size), rel=0.15)


@pytest.mark.parametrize("dense", [0, 1])
def test_dense_sampling_of_some_sizes_does_not_decide_for_the_others(dense: int) -> None:
    """No line fits both halves: the same compromise, however often either is sampled."""

    def bent_s(size_bytes: int) -> float:
        return 1e-4 + 1e-9 * size_bytes * (1 + 0.01 * math.log2(size_bytes / MIB))

    few = [MIB << k for k in range(9)]
    start, stop = (few[0], few[1]) if dense == 0 else (few[-2], few[-1])
    many = sorted({*few, *range(start, stop, (stop - start) // 64)})
    a, b = (fitted(bent_s, sizes).curve for sizes in (few, many))
    for size in few:
        assert b.seconds(size) == pytest.approx(a.seconds(size), rel=0.035)


@some.few
@given(st.lists(st.tuples(st.integers(0, 1 << 34), st.floats(1e-6, 1)), min_size=4, max_size=8))
def test_the_pieces_are_the_best_of_all(pairs: Pairs) -> None:
    """Against every way to cut the points, with each line as :func:`relative_line` finds it."""
    ordered = sorted(dict(pairs).items())
    assume(len(ordered) > 3)
    sizes, times = [m for m, _ in ordered], [t for _, t in ordered]
    weights = [1.0 + 0.1 * index for index in range(len(sizes))]
    n = len(sizes)

    def squared(first: int, stop: int) -> float:
        own = slice(first, stop)
        a, b = relative_line(sizes[own], times[own], weights[own])
        rows = zip(sizes[own], times[own], weights[own], strict=True)
        return math.fsum(w * ((a + b * m) / t - 1) ** 2 for m, t, w in rows)

    def criterion(cuts: tuple[int, ...]) -> float:
        found = (len(cuts) + 1) * (2 * math.log(n) + 4 * math.log(KNOWN_BEFOREHAND))
        for i, j in itertools.pairwise((0, *cuts, n)):
            freedom = j - i - 2  # two points tell nothing
            if freedom > 0:
                mean = squared(i, j) / math.fsum(weights[i:j])
                variance = mean * (j - i) / freedom
                share = max(math.fsum(weights[i:j]) / (j - i), 1.0)
                found += freedom * share * math.log(max(variance, RESOLUTION**2))
        return found

    ways = [
        cuts
        for count in range(n // 2)
        for cuts in itertools.combinations(range(1, n), count)
        if all(j - i >= 2 for i, j in itertools.pairwise((0, *cuts, n)))
    ]
    found = best_pieces(sizes, times, weights)
    least = min(map(criterion, ways))
    assert criterion(tuple(found[1:])) <= least + 1e-3 * abs(least)


def test_five_hundred_sizes_are_fitted_without_trying_every_line_anew() -> None:
    """As many sums as there are first points, not as there are pairs of points."""
    noise = random.Random(0)
    sizes = [MIB * k for k in range(1, 513)]
    assert fitted(lambda m: two_pieces_s(m) * noise.uniform(0.97, 1.03), sizes).error < 0.02
    with pytest.raises(UserError, match="at most 4096 sizes, found 4097"):
        fit_cost_curve(points([(m, 1.0) for m in range(4097)]))


@some.few
@given(measured)
def test_a_curve_through_the_points_is_exact_and_straight_between_them(pairs: Pairs) -> None:
    distinct = sorted(dict(pairs).items())
    assume(distinct[0][1] <= min(t for _, t in distinct))  # an empty message costs no more
    fit = curve_through(points(distinct))
    assert fit.error_max < 1e-9
    for (smaller, before), (larger, after) in itertools.pairwise(distinct):
        if before <= after and (larger - smaller) % 2 == 0:
            half = fit.curve.seconds((smaller + larger) // 2)
            assert half == pytest.approx((before + after) / 2, rel=1e-9)


def test_a_curve_through_the_points_goes_on_as_they_do() -> None:
    curve = curve_through(points([(100, 2.0), (200, 3.0), (400, 4.0)])).curve
    assert [curve.seconds(size) for size in (0, 50)] == pytest.approx([1.0, 1.5])
    assert curve.seconds(700) == pytest.approx(4 + 300 * 2 / 300)
    steep = curve_through(points([(100, 1.0), (200, 3.0)])).curve
    assert steep.seconds(50) == pytest.approx(0.5)
    rounded = curve_through(points([(97, 0.10949321036740327), (98, 1.0)])).curve
    assert rounded.latency_s == 0


@pytest.mark.parametrize("fit", [fit_cost_curve, curve_through])
@given(measured)
def test_the_errors_are_what_they_claim(fit: Fitting, pairs: Pairs) -> None:
    found = fit(points(pairs))
    distinct = list(dict(pairs).items())
    assert fit(points(distinct)) == fit(points(distinct[::-1]))  # whatever the order
    expected = errors(found.curve, points(pairs))
    assert found.error == pytest.approx(statistics.fmean(expected), rel=1e-9, abs=1e-12)
    assert found.error_max == max(expected)


@pytest.mark.parametrize(
    # Mean relative error in 1-32 MiB, where DDP's buckets lie (a straight line's: 50, 45 and 31 %),
    # and the median error everywhere if only powers of two are measured.
    ("gpus", "mean", "median"),
    [(2, 0.014, 0.018), (4, 0.020, 0.007), (8, 0.019, 0.007)],
)
def test_a100_curves(gpus: int, mean: float, median: float) -> None:
    path = A100 / f"a100_AR_GPU{gpus}_1M_1024M_LUT.csv"
    if not path.exists():
        pytest.skip(f"no measured all-reduces: {path} is absent")
    rows = list(csv.reader(path.read_text().splitlines()))[1:]
    all_points = points([(int(row[0]), int(row[3]) * 1e-9) for row in rows])  # out of place, in ns
    assert len(all_points) == 1024
    fit = fit_cost_curve(all_points)
    assert fit.error < 0.01
    small = errors(fit.curve, [p for p in all_points if p.size_bytes <= 32 * MIB])
    assert statistics.fmean(small) == pytest.approx(mean, abs=0.004)
    sparse = fit_cost_curve([p for p in all_points if p.size_bytes.bit_count() == 1]).curve
    assert statistics.median(errors(sparse, all_points)) == pytest.approx(median, abs=0.001)


def test_a_single_slow_measurement_does_not_lift_the_curve() -> None:
    """It costs hardly more than the next size does (twice as much), and reaches no further."""
    for factor, at in itertools.product([3, 10, 100], range(17)):

        def true_s(index: int) -> float:
            return 1e-4 + 1e-9 * (1024 << index)

        times = [true_s(i) * (factor if i == at else 1) for i in range(17)]
        fit = fit_cost_curve(points([(1024 << i, t) for i, t in enumerate(times)]))
        for index in range(17):
            lifted = fit.curve.seconds(1024 << index) / true_s(index)
            near = index in (at, at + 1) or at >= 14  # the last has no neighbour to be held down by
            assert 0.85 < lifted < (2.6 if near else 1.3), (index, lifted)


def test_an_outlier_among_repeated_sizes_is_outvoted() -> None:
    pairs = [(1024 << i, (1e-4 + 1e-9 * (1024 << i)) * f) for i in range(12) for f in (1, 1, 1)]
    pairs[16] = (pairs[16][0], pairs[16][1] * 50)
    curve = fit_cost_curve(points(pairs)).curve
    for size, _ in pairs:
        assert curve.seconds(size) == pytest.approx(1e-4 + 1e-9 * size, rel=0.1)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "at least two sizes"),
        ([(8, 1.0)], "at least two sizes"),
        ([(8, 1.0), (8, 2.0)], "at least two sizes"),
        ([(8, 1.0), (9, 0.0)], "above zero, found 0.0 s for 9 bytes"),
        ([(8, -1.0), (9, 1.0)], "above zero, found -1.0 s for 8 bytes"),
        ([(8, math.nan), (9, 1.0)], "above zero, found nan s"),
        ([(8, math.inf), (9, 1.0)], "above zero, found inf s"),
        ([(-8, 1.0), (9, 1.0)], "at least 0 bytes, found -8"),
    ],
)
def test_points_that_no_curve_goes_through(pairs: Pairs, message: str) -> None:
    for fit in (fit_cost_curve, curve_through):
        with pytest.raises(UserError, match=message):
            fit(points(pairs))


@some.few
@given(measured)
def test_the_line_is_the_best_of_its_neighbourhood(pairs: Pairs) -> None:
    sizes, times = [m for m, _ in pairs], [t for _, t in pairs]

    def squared(a: float, b: float) -> float:
        return math.fsum(((a + b * m) / t - 1) ** 2 for m, t in zip(sizes, times, strict=True))

    a, b = relative_line(sizes, times)
    assert a >= 0
    assert b >= 0
    least = squared(a, b)
    for da, db in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99), (1.01, 0.99), (0.99, 1.01)):
        assert least <= squared(a * da, b * db) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("hidden_s", [0.0, 2e-3])
def test_what_two_at_once_hide_and_occupy(hidden_s: float) -> None:
    occupied = {m: 1e-3 + m * 1e-8 for m in (256, 65536, 1 << 20, 1 << 22)}
    alone = CostCurve.line(1e-3 + hidden_s, 1e-8)
    curve = fit_pipelined(points(list(occupied.items())), alone)
    assert curve.latency_s == pytest.approx(hidden_s, abs=1e-9)
    for size, seconds in occupied.items():
        assert curve.seconds(size) - curve.latency_s == pytest.approx(seconds, rel=1e-6)
        assert curve.seconds(size) == pytest.approx(alone.seconds(size), rel=1e-6)


@some.few
@given(measured, measured)
def test_two_at_once_never_hide_less_than_nothing(two: Pairs, one: Pairs) -> None:
    alone = fit_cost_curve(points(one)).curve
    two = list(zip(sorted(m for m, _ in two), sorted(t for _, t in two), strict=True))
    curve = fit_pipelined(points(two), alone)
    occupied = fit_cost_curve(points(two)).curve
    lifted = occupied.without_gain_from_cutting()
    assert curve.latency_s >= 0
    sizes = {size for size, _ in two if size}
    rest = {size: curve.seconds(size) - curve.latency_s for size in sizes}
    ways = ({m: c.seconds(m) for m in sizes} for c in (occupied, lifted))
    assert any(rest == pytest.approx(expected, rel=1e-6, abs=1e-12) for expected in ways)


@pytest.mark.parametrize(
    "times_ms",
    # Measured on four emulated hosts at 1 Gbit/s.
    [
        (5.05, 3.24, 2.41, 3.28, 3.38, 4.33, 4.03, 4.44, 6.73, 13.07, 26.40, 52.54, 103.36),
        (4.52, 3.78, 4.93, 3.90, 4.66, 5.89, 6.14, 4.39, 7.02, 13.03, 26.04, 52.17, 104.36),
        (2.86, 2.28, 3.91, 3.84, 4.22, 4.42, 5.60, 4.68, 7.10, 13.06, 26.04, 52.20, 104.59),
    ],
)
def test_noise_of_small_messages_leaves_the_rate_of_large_ones(times_ms: tuple[float, ...]) -> None:
    sizes = [1 << n for n in (8, 10, 12, *range(14, 24))]
    two = [(size, ms / 1e3) for size, ms in zip(sizes, times_ms, strict=True)]
    curve = fit_pipelined(points(two), CostCurve.line(0.0, 1.2e-8))
    for size, seconds in two[-5:]:
        assert curve.seconds(size) - curve.latency_s == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    ("alone_ns", "expected_ns"),
    [(4.93, 4.93), (4.0, 4.65), (9.0, 4.96)],
    ids=["as alone", "no less than at the end", "faster than alone"],
)
def test_beyond_the_largest_size_two_at_once_are_as_slow_as_one(
    alone_ns: float, expected_ns: float
) -> None:
    """Small messages of four hosts that share two cores take 5 ms, whatever their size."""
    sizes = [1 << n for n in (8, 10, 12, *range(14, 24))]
    times_ms = (*[5.0] * 9, 6.5, 11.1, 21.0, 41.6)
    two = [(size, ms / 1e3) for size, ms in zip(sizes, times_ms, strict=True)]
    curve = fit_pipelined(points(two), CostCurve.line(5e-3, alone_ns * 1e-9))
    largest = sizes[-1]
    rate = (curve.seconds(8 * largest) - curve.seconds(largest)) / (7 * largest)
    assert rate == pytest.approx(expected_ns * 1e-9, rel=0.02)


def test_noise_of_small_messages_leaves_the_curve_of_large_ones() -> None:
    # All-reduces between four emulated hosts at 1 Gbit/s, KiB and ms.
    measured = [
        *[(0.25, 7.66), (1, 2.09), (4, 5.34), (16, 3.53), (24, 4.04), (48, 4.65), (64, 5.38)],
        *[(96, 4.10), (192, 4.11), (256, 3.82), (384, 5.17), (768, 10.30), (1024, 13.25)],
        *[(1536, 19.97), (2048, 26.29), (3072, 39.11), (4096, 52.02), (6144, 78.48)],
        *[(8192, 103.89), (12288, 155.97), (24576, 310.87), (99832, 1248.87)],
    ]
    all_points = points([(round(kib * 1024), ms / 1e3) for kib, ms in measured])
    curve = fit_cost_curve(all_points).curve
    for point in all_points[-12:]:
        assert curve.seconds(point.size_bytes) == pytest.approx(point.time_s, rel=0.03)


def test_noise_makes_no_cut_free() -> None:
    # Small messages that a link's burst lets pass, and large ones at the rate of the line.
    two = {256: 1.12e-3, 16384: 1.12e-3, 65536: 1.13e-3, 92000: 1.11e-3, 262144: 3.4e-3}
    two |= {m: m * 12.35e-9 for m in (1 << 20, 1 << 22, 1 << 23)}
    alone = CostCurve.line(1.2e-3, 12.4e-9)
    curve = fit_pipelined(points(list(two.items())), alone)
    whole = curve.seconds(1 << 23) - curve.latency_s
    for pieces in (2, 16, 91, 128, 512, 8192):
        part = curve.seconds((1 << 23) // pieces) - curve.latency_s
        assert part * pieces >= whole * (1 - 1e-9)


def test_what_is_clearly_cheaper_in_pieces_stays_so() -> None:
    # What fits into a cache, and what does not.
    two = {m: 1e-5 + m * 1e-10 for m in (1 << 16, 1 << 18, 1 << 20)}
    two |= {m: m * 3e-10 for m in (1 << 22, 1 << 23)}
    curve = fit_pipelined(points(list(two.items())), CostCurve.line(1e-4, 3e-10))
    whole = curve.seconds(1 << 23) - curve.latency_s
    assert 8 * (curve.seconds(1 << 20) - curve.latency_s) < 0.6 * whole


@given(
    st.floats(1e6, 1e10), st.integers(0, 20_000), st.floats(1e-6, 1e-3), st.integers(2**20, 2**24)
)
@example(rate=2969379958.0, depth=3788, latency_s=1e-06, total=1 << 20)  # between measured sizes
def test_none_beats_the_lasting_rate(rate: float, depth: int, latency_s: float, total: int) -> None:
    """Behind a token bucket, ``depth`` bytes pass for nothing after a pause.

    Holds up to the largest message measured; beyond it, a row may have paid for its latencies.
    """
    sizes = [256 << k for k in range(17)]
    alone = points([(s, latency_s + max(s - depth, 0) / rate) for s in sizes])
    rows = points([(s, latency_s + s / rate) for s in sizes])
    fit = fit_cost_curve(alone).curve
    curve = without_bursts(fit, alone, rows)
    lasting_s = min(p.time_s / p.size_bytes for p in rows[9:])
    assert curve == fit or curve.cheapest_s(total) >= lasting_s * total * (1 - 1e-6)
    assert curve.cheapest_s(total) >= 0.7 * lasting_s * total
    assert all(curve.seconds(s) >= fit.seconds(s) * (1 - 1e-9) for s in sizes)
    if not depth:
        assert curve == fit


def test_a_link_has_the_rate_that_lasts() -> None:
    """As measured on an emulated link of 150 Mbit/s: 0.28 ms up to 16 KiB, then 18.75 MB/s."""
    sizes = [256, 4096, 65536, 1 << 20]
    times = [2.8e-4, 2.8e-4, 2.8e-4 + (65536 - 16384) / 18.75e6, 2.8e-4 + (2**20 - 16384) / 18.75e6]
    alpha_s, beta = link_line(sizes, times)
    assert 1 / beta == pytest.approx(18.75e6, rel=0.01)
    assert alpha_s == pytest.approx(2.8e-4)
    plain = [1e-4 + size / 1e9 for size in sizes]
    assert link_line(sizes, plain) == pytest.approx((1e-4, 1e-9), rel=1e-6)
