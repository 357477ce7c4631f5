"""The least of several costs, exact at every whole number of bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS, all_reduce_line
from syncline.plan.cost import CostCurve, lower_envelope
from syncline.plan.quantities import LARGEST_BYTES
from tests import strategies as some

LINES = [CostCurve.line(100.0, 0.0), CostCurve.line(0.0, 10.0), CostCurve.line(16.0, 3.0)]


def test_the_envelope_by_hand() -> None:
    # 10 M = 16 + 3 M at 2.29; 16 + 3 M = 100 at 28.
    best = lower_envelope(LINES)
    assert [segment.start_bytes for segment in best.segments] == [0, 3, 28]
    assert [best.seconds(size) for size in (0, 2, 3, 27, 28, 10**9)] == [0, 20, 25, 97, 100, 100]


@some.many
@given(
    st.lists(some.curves(), min_size=1, max_size=5), st.lists(st.integers(0, 1 << 34), max_size=8)
)
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


@some.few
@given(st.lists(some.curves(), min_size=1, max_size=4))
def test_the_envelope_of_the_envelope(curves: list[CostCurve]) -> None:
    best = lower_envelope(curves)
    again = lower_envelope([best, *curves])
    for segment in (*best.segments, *again.segments):
        size = segment.start_bytes
        assert again.seconds(size) == pytest.approx(best.seconds(size), rel=1e-9)


@pytest.mark.parametrize("workers", [4, 64, 1000])
def test_small_messages_double_and_large_ones_halve(workers: int) -> None:
    lines = {
        name: all_reduce_line(name, workers=workers, alpha_s=2e-5, beta_s_per_byte=8e-10)
        for name in ALL_REDUCE_ALGORITHMS
        if name != "double-binary-trees"
    }
    first, second = lower_envelope(list(lines.values())).segments
    before, after = lines["recursive-doubling"], lines["halving-doubling"]
    at = second.start_bytes
    assert first.s_per_byte == before.segments[0].s_per_byte
    assert second.s_per_byte == after.segments[0].s_per_byte
    assert before.seconds(at - 1) < after.seconds(at - 1)
    assert before.seconds(at) >= after.seconds(at)


def test_a_crossing_beyond_every_message_is_none() -> None:
    best = lower_envelope([CostCurve.line(0.0, 1e-9), CostCurve.line(1e30, 0.0)])
    assert len(best.segments) == 1
    assert best.seconds(LARGEST_BYTES) == pytest.approx(LARGEST_BYTES * 1e-9)


def test_lines_that_meet_never_start_twice() -> None:
    starts = [s.start_bytes for s in lower_envelope(LINES).segments]
    assert all(x < y for x, y in itertools.pairwise(starts))


def test_the_least_of_nothing() -> None:
    with pytest.raises(UserError, match="name at least one"):
        lower_envelope([])
