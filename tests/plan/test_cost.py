"""Cost curves, their lower bound, and curves made from curves."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.cost import CostCurve, lower_envelope
from syncline.plan.quantities import LARGEST_BYTES
from tests import strategies as some

Row = tuple[int, float, float]


def curve(*rows: Row) -> CostCurve:
    return CostCurve.of_rows(rows)


STEPS = curve((0, 10.0, 1.0), (100, 200.0, 0.5), (200, 250.0, 0.0))


@pytest.mark.parametrize(
    ("size_bytes", "expected_s"),
    [(0, 10), (1, 11), (99, 109), (100, 200), (150, 225), (200, 250), (10**12, 250)],
)
def test_a_curve_is_read_piece_by_piece(size_bytes: int, expected_s: float) -> None:
    assert STEPS.seconds(size_bytes) == expected_s


def test_a_curve_becomes_the_line_through_its_ends() -> None:
    assert STEPS.latency_s == 10
    assert STEPS.linearised(150) == (10.0, (225 - 10) / 150)
    assert STEPS.linearised(0) == (10.0, 1.0)
    for size in (0, 1000):
        assert CostCurve.line(3.0, 2.0).linearised(size) == (3.0, 2.0)


@pytest.mark.parametrize(  # what a file can hold: see test_document
    ("row", "message"),
    [
        ((0, 1.0, -1.0), "s_per_byte must be finite and at least 0"),
        ((0, math.nan, 1.0), "cost_s must be finite"),
        ((0, 1.0, math.inf), "s_per_byte must be finite"),
    ],
)
def test_what_is_no_curve(row: Row, message: str) -> None:
    with pytest.raises(UserError, match=message):
        curve(row)


def test_the_cheapest_rate_may_lie_inside() -> None:
    # 1 byte: 11 s a byte; 99: 1.10; 100: 2; 199: 1.254; 200: 1.25; 1000: 0.25.
    found = [STEPS.cheapest_s(size) for size in (0, 1, 100, 200, 1000)]
    assert found == pytest.approx([0, 11, 100 * 109 / 99, 200 * 109 / 99, 250])


@some.many
@given(some.falling_curves(), st.data())
def test_no_partition_is_cheaper_than_the_bound(tried: CostCurve, data: st.DataObject) -> None:
    """Whole tensors or split ones: a partition of the bytes is all that a plan can choose."""
    near = [s.start_bytes + d for s in tried.segments for d in (-1, 0, 1)]
    size = st.sampled_from(near).filter(lambda b: b > 0) | st.integers(1, 1 << 33)
    pieces = data.draw(st.lists(size, min_size=1, max_size=8))
    total_s = math.fsum(tried.seconds(piece) for piece in pieces)
    assert tried.cheapest_s(sum(pieces)) <= total_s * (1 + 1e-9)


def test_at_least_a_line_by_hand() -> None:
    found = STEPS.at_least(0.0, 1.5)
    expected_s = {0: 10, 19: 29, 20: 30, 99: 148.5, 100: 200, 133: 216.5, 134: 217, 200: 300}
    assert {size: found.seconds(size) for size in expected_s} == expected_s


@some.many
@given(
    some.curves(), st.floats(0, 2), st.floats(0, 1e-6), st.lists(st.integers(0, 2**40), min_size=1)
)
def test_at_least_a_line(tried: CostCurve, a_s: float, rate: float, sizes: list[int]) -> None:
    found = tried.at_least(a_s, rate)
    for size in (*sizes, *(s.start_bytes for s in tried.segments)):
        line_s = a_s + rate * size
        assert found.seconds(size) == pytest.approx(max(tried.seconds(size), line_s), abs=1e-6)


@given(some.falling_curves(), st.lists(st.integers(0, 1 << 34), min_size=1, max_size=20))
def test_what_never_falls_is_the_running_maximum(tried: CostCurve, sizes: list[int]) -> None:
    lifted = tried.never_falling()
    ends = {s.start_bytes - 1 for s in tried.segments[1:]}
    for size in {*sizes, *ends, *(end + 1 for end in ends)}:
        highest_s = max(tried.seconds(m) for m in (size, *ends) if m <= size)
        assert lifted.seconds(size) == pytest.approx(highest_s, rel=1e-8)
    assert lifted.never_falling() == lifted


@given(some.curves())
def test_a_curve_that_never_falls_stays_itself(tried: CostCurve) -> None:
    assert tried.never_falling() == tried


def test_a_fall_is_level_until_the_curve_is_as_dear_again() -> None:
    falling = curve((0, 10.0, 1.0), (100, 50.0, 2.0), (110, 20.0, 0.0))
    assert falling.never_falling().rows() == [(0, 10.0, 1.0), (100, 109.0, 0.0), (110, 109.0, 0.0)]
    again = curve((0, 10.0, 1.0), (100, 50.0, 2.0)).never_falling()
    assert again.rows() == [(0, 10.0, 1.0), (100, 109.0, 0.0), (130, 110.0, 2.0)]


@some.few
@given(some.falling_curves(), st.lists(st.integers(1, 1 << 34), min_size=1, max_size=20))
def test_no_size_costs_less_a_byte_than_a_larger_one(tried: CostCurve, sizes: list[int]) -> None:
    lifted = tried.without_gain_from_cutting()
    starts = [s.start_bytes for s in tried.segments[1:]]
    corners = {m for start in starts for m in (start - 1, start) if m > 0}
    for size in {*sizes, *corners}:
        # The largest cost a byte of this size and all above it is at a corner, or in the limit.
        dearest = max(
            tried.segments[-1].s_per_byte,
            *(tried.seconds(m) / m for m in (size, *corners) if m >= size),
            0.0,
        )
        assert lifted.seconds(size) == pytest.approx(dearest * size, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("rows", [[(0, 1.0, 2.0), (10, 21.0, 1.0), (30, 41.0, 0.5)], [(0, 0, 0)]])
def test_a_curve_without_gain_from_cutting_stays_itself(rows: list[Row]) -> None:
    assert curve(*rows).without_gain_from_cutting() == curve(*rows)


@given(st.lists(some.curves(), max_size=4), st.integers(0, 1 << 34))
def test_in_turn_costs_the_sum(parts: list[CostCurve], size: int) -> None:
    total_s = math.fsum(part.seconds(size) for part in parts)
    assert CostCurve.in_turn(parts).seconds(size) == pytest.approx(total_s, rel=1e-9)


@some.few
@given(some.falling_curves(), st.floats(0, 10), st.floats(0, 10), st.integers(0, 1 << 34))
def test_a_rebased_curve(tried: CostCurve, latency_s: float, rate: float, size: int) -> None:
    expected_s = latency_s + rate * (tried.seconds(size) - tried.latency_s)
    found_s = tried.rebased(latency_s, rate).seconds(size)
    assert found_s == pytest.approx(expected_s, rel=1e-9, abs=1e-12)


# All of the second piece is lost when it is added to a second.
@example(curve((0, 0.0, 1e-300), (2, 2e-300, 0.0)), 1.0, 0.0, 0)
@some.few
@given(tried=some.curves(), a_s=st.floats(0, 1), b=st.floats(0, 1e-6), size=st.integers(0, 10**9))
def test_less_undoes_in_turn(tried: CostCurve, a_s: float, b: float, size: int) -> None:
    line = CostCurve.line(a_s, b)
    back = CostCurve.in_turn([tried, line]).less(line)
    assert back.seconds(size) == pytest.approx(tried.seconds(size), rel=1e-6, abs=1e-6)


@given(some.falling_curves(), st.sampled_from([0.0, 1e-6, 0.25]), st.integers(0, 1 << 30))
def test_raised_adds_to_all_but_empty_messages(tried: CostCurve, extra_s: float, size: int) -> None:
    expected_s = tried.seconds(size) + (extra_s if size else 0.0)
    assert tried.raised(extra_s).seconds(size) == pytest.approx(expected_s)


def test_the_envelope_by_hand() -> None:
    # 10 M = 16 + 3 M at 2.29; 16 + 3 M = 100 at 28.
    best = lower_envelope([CostCurve.line(*line) for line in [(100, 0), (0, 10), (16, 3)]])
    assert [segment.start_bytes for segment in best.segments] == [0, 3, 28]
    assert [best.seconds(size) for size in (0, 2, 3, 27, 28, 10**9)] == [0, 20, 25, 97, 100, 100]
    with pytest.raises(UserError, match="name at least one"):
        lower_envelope([])


@some.many
@given(st.lists(some.curves(), min_size=1, max_size=5), st.lists(st.integers(0, 2**34), max_size=8))
def test_the_envelope_is_the_minimum_everywhere(curves: list[CostCurve], sizes: list[int]) -> None:
    best = lower_envelope(curves)
    near = [s.start_bytes + d for c in (*curves, best) for s in c.segments for d in (-1, 0, 1)]
    for size in {0, *sizes, *(n for n in near if n >= 0)}:
        least = min(curve.seconds(size) for curve in curves)
        assert best.seconds(size) == pytest.approx(least, rel=1e-9)


@some.few
@given(st.lists(some.integer_curves(), min_size=1, max_size=4))
def test_small_sizes_one_by_one(drawn: list[some.IntegerCurve]) -> None:
    best = lower_envelope([d.curve() for d in drawn])
    for size in range(300):
        least_ns = min(d.cost_ns(size) for d in drawn)
        assert best.seconds(size) * 1e9 == pytest.approx(least_ns, rel=1e-9, abs=1e-9)


def test_a_crossing_beyond_every_message_is_none() -> None:
    best = lower_envelope([CostCurve.line(0.0, 1e-9), CostCurve.line(1e30, 0.0)])
    assert len(best.segments) == 1
    assert best.seconds(LARGEST_BYTES) == pytest.approx(LARGEST_BYTES * 1e-9)
