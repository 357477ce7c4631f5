"""The native merge: what it refuses, and costs to the nanosecond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import _native
from syncline.plan.cost import CostCurve
from tests import strategies as some

LINE = [(0, 1e-6, 1e-9)]
LONGEST = 1 << 46
Row = tuple[int, float, float]


@some.few
@given(some.integer_curves(), st.lists(st.integers(0, 10_000), max_size=20))
def test_costs_are_the_curves_to_the_nanosecond(curve: some.IntegerCurve, sizes: list[int]) -> None:
    assert _native.costs(sizes, curve.curve().rows()) == [curve.cost_ns(size) for size in sizes]


@some.few
@given(some.curves(), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=20))
def test_costs_are_the_models(curve: CostCurve, sizes: list[int]) -> None:
    for size, found in zip(sizes, _native.costs(sizes, curve.rows()), strict=True):
        expected = min(curve.seconds(size) * 1e9, LONGEST + 1)
        assert found == pytest.approx(expected, rel=1e-12, abs=0.51)


def test_a_cost_beyond_all_range_is_the_largest() -> None:
    assert _native.costs([0, 1 << 62], [(0, 1e300, 1e300)]) == [LONGEST + 1] * 2


def test_nothing_to_merge() -> None:
    assert _native.merge([], [], LINE) == []
    assert _native.merge([5], [0], LINE) == [0]


@pytest.mark.parametrize(
    ("ready", "sizes", "rows", "said"),
    [
        ([1, 2], [1], LINE, "as many sizes as ready times"),
        ([2, 1], [1, 1], LINE, "nor ready times decrease"),
        ([1, 2], [1, -1], LINE, "sizes must not be negative"),
        ([1, 2], [1 << 62, 1 << 62], LINE, "more than 64 bits hold"),
        ([1], [1], [], "needs a first segment"),
        ([1], [1], [(1, 1.0, 1.0)], "needs a first segment"),
        ([1], [1], [(0, 1.0, 1.0), (0, 1.0, 1.0)], "in increasing order"),
    ],
)
def test_what_is_refused(ready: list[int], sizes: list[int], rows: list[Row], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _native.merge(ready, sizes, rows)


def test_the_largest_times_and_costs_stay_in_range() -> None:
    last = _native.merge([LONGEST] * 100, [1 << 50] * 100, [(0, 1e300, 1e300)])
    assert last[-1] == 99
