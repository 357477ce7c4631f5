"""Exchanges by name, and measured curves carried over from one to another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.model.cost import CostCurve, CostSegment
from syncline.model.exchange import EXCHANGES, Exchange, rescaled
from syncline.model.link import Link
from syncline.model.sparse_costs import SPARSE_ALGORITHMS
from tests import strategies as some

LINK = Link(alpha_s=2e-5, beta_s_per_byte=8e-10, gamma_s_per_byte=1e-10)
REFERENCE = 1 << 26


def exchange(algorithm: str = "ring", workers: int = 8, **changes: Any) -> Exchange:
    if algorithm in SPARSE_ALGORITHMS:
        changes.setdefault("density", 0.001)
    return Exchange(algorithm=algorithm, workers=workers, link=LINK, **changes)


exchanges = st.builds(exchange, st.sampled_from(EXCHANGES), st.integers(2, 300))


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_one_worker_exchanges_nothing(algorithm: str) -> None:
    assert exchange(algorithm, 1).curve().seconds(10**9) == 0


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_every_algorithm_costs_more_for_more(algorithm: str) -> None:
    curve = exchange(algorithm).curve()
    costs = [curve.seconds(size) for size in (0, 1, 1000, 10**6, 10**9)]
    assert costs[0] > 0
    assert all(x < y for x, y in itertools.pairwise(costs))


def test_servers() -> None:
    one, many = (exchange(a).curve() for a in ("parameter-server", "sharded-parameter-server"))
    assert one.seconds(10**8) > 7 * many.seconds(10**8)


def test_hosts() -> None:
    inside = Link(alpha_s=0.0, beta_s_per_byte=0.0, gamma_s_per_byte=0.0)
    nested = exchange(workers=32, hosts=8, inside=inside)
    flat = exchange(workers=8)
    assert nested.curve().startup_s == flat.curve().startup_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "rong"}, "did you mean 'ring'"),
        ({"algorithm": "top-k", "density": None}, "top-k needs a density, such as 0.001"),
        ({"density": 0.1}, "ring sends every element"),
        ({"hosts": 3, "inside": LINK}, "8 workers cannot be spread evenly over 3 hosts"),
        ({"hosts": 4}, "need a link inside a host"),
        ({"algorithm": "parameter-server", "hosts": 4, "inside": LINK}, "has no form for hosts"),
    ],
)
def test_what_is_no_exchange(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        exchange(**changes)


# Measured curves


@some.few
@example(exchange("binary-tree", 2), exchange("linear-pipeline", 3))
@given(exchanges, exchanges)
def test_a_formula_becomes_the_other_formula(before: Exchange, after: Exchange) -> None:
    assert rescaled(before.curve(), before, after, REFERENCE) in (after.curve(), before.curve())
    found = rescaled(before.curve(), before, after, REFERENCE)
    for size in (0, 1000, 10**8):
        assert found.seconds(size) == pytest.approx(after.curve().seconds(size))


@some.few
@given(some.curves(), exchanges)
def test_nothing_changed_is_the_curve_itself(curve: CostCurve, before: Exchange) -> None:
    assert rescaled(curve, before, before, REFERENCE) is curve


@some.many
@given(some.curves(), exchanges, exchanges, st.lists(st.integers(0, 1 << 34), min_size=2))
def test_it_does_not_decrease(
    curve: CostCurve, before: Exchange, after: Exchange, sizes: list[int]
) -> None:
    found = rescaled(curve, before, after, REFERENCE)
    costs = [found.seconds(size) for size in sorted(sizes)]
    assert all(x <= y * (1 + 1e-9) for x, y in itertools.pairwise(costs))


@some.many
@given(some.curves(), st.integers(2, 3000), st.integers(0, 1 << 34))
def test_there_and_back_is_the_same(curve: CostCurve, workers: int, size: int) -> None:
    assume(curve.startup_s > 1e-9)  # one that is 0 grows by a difference, and cannot shrink
    here, there = exchange(workers=8), exchange(workers=workers)
    moved = rescaled(curve, here, there, REFERENCE)
    back = rescaled(moved, there, here, REFERENCE)
    assert back.seconds(size) == pytest.approx(curve.seconds(size), rel=1e-6, abs=1e-12)


def test_a_measured_shape_is_kept() -> None:
    """Twice as slow to start and with a jump at 1 MiB: both stay, scaled as the formula says."""
    formula = exchange(workers=8).curve()
    a_s, b = formula.startup_s, formula.segments[0].s_per_byte
    jump = 1 << 20
    measured = CostCurve(
        segments=(
            CostSegment(start_bytes=0, cost_s=2 * a_s, s_per_byte=b),
            CostSegment(start_bytes=jump, cost_s=2 * a_s + 3 * b * jump, s_per_byte=b / 2),
        )
    )
    after = exchange(workers=64)
    more = after.curve()
    found = rescaled(measured, exchange(workers=8), after, REFERENCE)
    more_a, more_b = more.startup_s, more.segments[0].s_per_byte
    assert found.startup_s == pytest.approx(2 * more_a)
    assert [s.start_bytes for s in found.segments] == [0, jump]
    assert found.seconds(jump) == pytest.approx(2 * more_a + 3 * more_b * jump)
    assert found.segments[1].s_per_byte == pytest.approx(more_b / 2)


def test_a_formula_with_a_shape_keeps_its_own() -> None:
    measured = CostCurve.line(1.0, 1e-6)
    before, after = exchange(), exchange("linear-pipeline")
    found = rescaled(measured, before, after, REFERENCE)
    assert [s.start_bytes for s in found.segments] == [
        s.start_bytes for s in after.curve().segments
    ]
    formula = before.curve()
    assert found.startup_s == pytest.approx(after.curve().startup_s / formula.startup_s)


def test_a_single_worker_has_nothing_to_scale() -> None:
    after = exchange(workers=8)
    assert rescaled(CostCurve.line(0, 0), exchange(workers=1), after, REFERENCE) == after.curve()


def test_a_startup_that_was_not_measured_grows_by_the_difference() -> None:
    measured = CostCurve.line(0.0, 1e-6)
    found = rescaled(measured, exchange(workers=8), exchange(workers=16), REFERENCE)
    assert found.startup_s == pytest.approx(2 * 8 * LINK.alpha_s)
