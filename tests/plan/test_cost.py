"""Cost curves, their lower bound, and MG-WFBP's table of all-reduce costs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.cost import CostCurve, CostSegment
from tests import strategies as some


def curve(*segments: tuple[int, float, float]) -> CostCurve:
    return CostCurve(
        segments=tuple(
            CostSegment(start_bytes=start, cost_s=cost, s_per_byte=rate)
            for start, cost, rate in segments
        )
    )


STEPS = curve((0, 10.0, 1.0), (100, 200.0, 0.5), (200, 250.0, 0.0))


@pytest.mark.parametrize(
    ("size_bytes", "expected_s"),
    [(0, 10), (1, 11), (99, 109), (100, 200), (150, 225), (200, 250), (10**12, 250)],
)
def test_a_curve_is_read_piece_by_piece(size_bytes: int, expected_s: float) -> None:
    assert STEPS.seconds(size_bytes) == expected_s


def test_the_larger_of_a_curve_and_a_line_by_hand() -> None:
    found = STEPS.at_least(0.0, 1.5)
    assert [found.seconds(size) for size in (0, 19, 20, 99, 100, 133, 134, 200)] == [
        *(10, 29, 30, 148.5),
        *(200, 216.5, 217, 300),
    ]


@some.many
@given(
    some.curves(),
    st.floats(0, 2),
    st.floats(0, 1e-6),
    st.lists(st.integers(0, 1 << 40), min_size=1),
)
def test_the_larger_of_a_curve_and_a_line(
    tried: CostCurve, a_s: float, rate: float, sizes: list[int]
) -> None:
    found = tried.at_least(a_s, rate)
    for size in (*sizes, *(s.start_bytes for s in tried.segments)):
        line_s = a_s + rate * size
        assert found.seconds(size) == pytest.approx(max(tried.seconds(size), line_s), abs=1e-6)


def test_latency_is_the_cost_of_nothing() -> None:
    assert STEPS.latency_s == 10
    assert CostCurve.line(3.0, 2.0).latency_s == 3


def test_a_line_is_its_own_line() -> None:
    assert CostCurve.line(3.0, 2.0).linearised(1000) == (3.0, 2.0)
    assert CostCurve.line(3.0, 2.0).linearised(0) == (3.0, 2.0)


def test_a_curve_becomes_the_line_through_its_ends() -> None:
    assert STEPS.linearised(150) == (10.0, (225 - 10) / 150)
    assert STEPS.linearised(0) == (10.0, 1.0)


@some.few
@given(some.curves(), st.lists(st.integers(0, 1 << 34), min_size=2, max_size=20))
def test_a_larger_message_never_costs_less(tried: CostCurve, sizes: list[int]) -> None:
    costs = [tried.seconds(size) for size in sorted(sizes)]
    for smaller, larger in itertools.pairwise(costs):
        assert larger >= smaller * (1 - 1e-9)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((), "no segments"),
        (((5, 1.0, 1.0),), "expected start_bytes 0, found 5"),
        (((0, 1.0, 1.0), (0, 9.0, 1.0)), r"segments\[1\]: start_bytes must increase"),
        (
            ((0, 1.0, 1.0), (10, 0.9, 1.0)),
            "falls to 9.0.*e-01 s, below the 1.0.*e[+]00 s of an empty",
        ),
        (((0, -1.0, 1.0),), "cost_s must be finite and at least 0"),
        (((0, 1.0, -1.0),), "s_per_byte must be finite and at least 0"),
        (((0, math.nan, 1.0),), "cost_s must be finite"),
        (((0, 1.0, math.inf),), "s_per_byte must be finite"),
    ],
)
def test_what_is_no_curve(segments: tuple[tuple[int, float, float], ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        curve(*segments)


@given(some.falling_curves(), st.lists(st.integers(0, 1 << 34), min_size=1, max_size=20))
def test_the_curve_that_never_falls_is_the_running_maximum(
    tried: CostCurve, sizes: list[int]
) -> None:
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


# The lower bound


def test_the_cheapest_rate_may_lie_inside() -> None:
    # 1 byte: 11 s a byte; 99: 1.10; 100: 2; 199: 1.254; 200: 1.25; 1000: 0.25.
    assert STEPS.cheapest_s(1) == 11
    assert STEPS.cheapest_s(100) == pytest.approx(100 * 109 / 99)  # no less than the rate of 99
    assert STEPS.cheapest_s(200) == pytest.approx(200 * 109 / 99)
    assert STEPS.cheapest_s(1000) == 250
    assert STEPS.cheapest_s(0) == 0


@some.many
@given(some.falling_curves(), st.data())
def test_no_partition_is_cheaper_than_the_bound(tried: CostCurve, data: st.DataObject) -> None:
    """Whole tensors or split ones: a partition of the bytes is all that a plan can choose."""
    near = [s.start_bytes + d for s in tried.segments for d in (-1, 0, 1)]
    size = st.sampled_from(near).filter(lambda b: b > 0) | st.integers(1, 1 << 33)
    pieces = data.draw(st.lists(size, min_size=1, max_size=8))
    total_s = math.fsum(tried.seconds(piece) for piece in pieces)
    assert tried.cheapest_s(sum(pieces)) <= total_s * (1 + 1e-9)


@some.few
@given(some.integer_curves(), st.integers(1, 40))
def test_the_bound_holds_against_the_best_of_all_partitions(
    tried: some.IntegerCurve, total: int
) -> None:
    best = [0]
    for size in range(1, total + 1):
        best.append(min(tried.cost_ns(last) + best[size - last] for last in range(1, size + 1)))
    assert tried.curve().cheapest_s(total) * 1e9 <= best[total] * (1 + 1e-9)


# Curves from curves


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


def test_a_curve_without_gain_from_cutting_stays_itself() -> None:
    concave = curve((0, 1.0, 2.0), (10, 21.0, 1.0), (30, 41.0, 0.5))
    assert concave.without_gain_from_cutting() == concave
    free = CostCurve.line(0.0, 0.0)
    assert free.without_gain_from_cutting() == free


@given(st.lists(some.curves(), max_size=4), st.integers(0, 1 << 34))
def test_in_turn_costs_the_sum(parts: list[CostCurve], size: int) -> None:
    total_s = math.fsum(part.seconds(size) for part in parts)
    assert CostCurve.in_turn(parts).seconds(size) == pytest.approx(total_s, rel=1e-9)


@some.few
@given(some.falling_curves(), st.floats(0, 10), st.floats(0, 10), st.integers(0, 1 << 34))
def test_rebased_has_that_latency_and_rate(
    tried: CostCurve, latency_s: float, rate: float, size: int
) -> None:
    expected_s = latency_s + rate * (tried.seconds(size) - tried.latency_s)
    assert tried.rebased(latency_s, rate).seconds(size) == pytest.approx(
        expected_s, rel=1e-9, abs=1e-12
    )


def test_sizes_are_whole_bytes_so_a_piece_ends_one_before_the_next() -> None:
    assert curve((0, 1.0, 1.0), (10, 10.0, 1.0)).seconds(9) == 10


# All of the second piece is lost when it is added to a second.
@example(curve((0, 0.0, 1e-300), (2, 2e-300, 0.0)), 1.0, 0.0, 0)
@some.few
@given(tried=some.curves(), a_s=st.floats(0, 1), b=st.floats(0, 1e-6), size=st.integers(0, 10**9))
def test_less_takes_off_what_in_turn_has_put_on(
    tried: CostCurve, a_s: float, b: float, size: int
) -> None:
    line = CostCurve.line(a_s, b)
    back = CostCurve.in_turn([tried, line]).less(line)
    assert back.seconds(size) == pytest.approx(tried.seconds(size), rel=1e-6, abs=1e-6)


@given(some.falling_curves(), st.sampled_from([0.0, 1e-6, 0.25]), st.integers(0, 1 << 30))
def test_raised_adds_a_constant_to_every_message_that_is_not_empty(
    tried: CostCurve, extra_s: float, size_bytes: int
) -> None:
    expected_s = tried.seconds(size_bytes) + (extra_s if size_bytes else 0.0)
    assert tried.raised(extra_s).seconds(size_bytes) == pytest.approx(expected_s)
