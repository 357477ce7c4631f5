"""MG-WFBP's table of all-reduce costs, held to counted steps, and PACE's Eq. 1."""

from __future__ import annotations

import math

import pytest

from syncline.errors import UserError
from syncline.plan.collective_costs import (
    ALL_REDUCE_ALGORITHMS,
    all_reduce_line,
)
from syncline.plan.cost import CostCurve
from tests.plan import steps

# MG-WFBP, Table 2


@pytest.mark.parametrize(
    ("algorithm", "a_s", "b_s_per_byte"),
    [
        # N = 8, alpha = 2, beta = 3, gamma = 5, so log N = 3.
        ("binary-tree", 12.0, 33.0),  # 2 * 2 * 3;  (2 * 3 + 5) * 3
        ("recursive-doubling", 6.0, 24.0),  # 2 * 3;  (3 + 5) * 3
        ("halving-doubling", 12.0, 9.625),  # 2 * 2 * 3;  2 * 3 - (2 * 3 + 5) / 8 + 5
        ("double-binary-trees", 12.0, 8.0),  # 2 * 2 * 3 (with alpha: erratum);  3 + 5
        ("two-tree", 12.0, 11.0),  # 2 * 2 * 3;  2 * 3 + 5
        ("ring", 28.0, 9.625),  # 2 * 7 * 2;  2 * 7 / 8 * 3 + 7 / 8 * 5
    ],
)
def test_table_2_by_hand(algorithm: str, a_s: float, b_s_per_byte: float) -> None:
    line = all_reduce_line(algorithm, workers=8, alpha_s=2, beta_s_per_byte=3, gamma_s_per_byte=5)
    assert line == CostCurve.line(a_s, b_s_per_byte)


def test_the_erratum_of_the_double_binary_trees_is_documented() -> None:
    text = " ".join((all_reduce_line.__doc__ or "").split())
    assert "Erratum: for the double binary trees the paper prints ``a = 2 log N``" in text
    # Without alpha it would be no time at all: it must scale with it.
    slow = all_reduce_line("double-binary-trees", workers=16, alpha_s=2.0, beta_s_per_byte=0)
    fast = all_reduce_line("double-binary-trees", workers=16, alpha_s=1.0, beta_s_per_byte=0)
    assert (slow.latency_s, fast.latency_s) == (16, 8)


@pytest.mark.parametrize("algorithm", ALL_REDUCE_ALGORITHMS)
def test_one_worker_exchanges_nothing(algorithm: str) -> None:
    line = all_reduce_line(algorithm, workers=1, alpha_s=1, beta_s_per_byte=1, gamma_s_per_byte=1)
    assert line.seconds(10**9) == 0


@pytest.mark.parametrize("algorithm", ALL_REDUCE_ALGORITHMS)
def test_more_workers_never_cost_less(algorithm: str) -> None:
    costs = [
        all_reduce_line(algorithm, workers=n, alpha_s=1e-5, beta_s_per_byte=1e-9).seconds(10**6)
        for n in range(1, 65)
    ]
    assert costs == sorted(costs)


def test_an_unknown_algorithm_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'rign'; did you mean 'ring'\? \(known: binary-tree, "):
        all_reduce_line("rign", workers=2, alpha_s=1, beta_s_per_byte=1)


@pytest.mark.parametrize("workers", [0, -3, 10**400])
def test_an_impossible_number_of_workers(workers: int) -> None:
    with pytest.raises(UserError, match="at least 1 and at most"):
        all_reduce_line("ring", workers=workers, alpha_s=1, beta_s_per_byte=1)


@pytest.mark.parametrize("alpha_s", [-1.0, math.nan, math.inf])
def test_an_impossible_latency_time(alpha_s: float) -> None:
    with pytest.raises(UserError, match="cost_s must be finite and at least 0"):
        all_reduce_line("ring", workers=4, alpha_s=alpha_s, beta_s_per_byte=1)


@pytest.mark.parametrize("workers", [2, 3, 5, 8, 9, 1000])
def test_rounds_are_whole(workers: int) -> None:
    line = all_reduce_line("binary-tree", workers=workers, alpha_s=1, beta_s_per_byte=0)
    assert line.latency_s == 2 * math.ceil(math.log2(workers))


# Counted steps


def test_an_all_gather_of_any_number_of_workers_takes_that_many_rounds() -> None:
    """So halving/doubling, an all-gather and its reverse, costs what the row says for any N."""
    for workers in range(2, 40):
        rounds, blocks = steps.bruck_all_gather(workers)
        line = all_reduce_line("halving-doubling", workers=workers, alpha_s=1, beta_s_per_byte=0)
        assert line.latency_s == 2 * rounds
        line = all_reduce_line("halving-doubling", workers=workers, alpha_s=0, beta_s_per_byte=1)
        assert line.seconds(workers) == pytest.approx(2 * blocks)


@pytest.mark.parametrize("workers", range(2, 12))
def test_the_ring_is_counted(workers: int) -> None:
    rounds, blocks = steps.ring_all_reduce(workers)
    assert (rounds, blocks) == (2 * (workers - 1), 2 * (workers - 1))
    line = all_reduce_line("ring", workers=workers, alpha_s=1, beta_s_per_byte=1)
    assert line.latency_s == rounds
    assert line.seconds(workers) == pytest.approx(rounds + blocks)


def test_the_erratum_of_the_double_trees_slope() -> None:
    """The printed beta is below what any all-reduce must receive; 2 beta is what trees receive."""
    for workers in range(3, 70):
        received = steps.double_tree_received(workers)
        least = 2 * (workers - 1) / workers  # of any all-reduce over one port, in messages
        assert 1 < least <= max(received) <= 2
        assert workers < 6 or max(received) == 2
        printed = all_reduce_line(
            "double-binary-trees", workers=workers, alpha_s=0, beta_s_per_byte=1
        )
        ours = all_reduce_line("two-tree", workers=workers, alpha_s=0, beta_s_per_byte=1)
        assert (printed.seconds(100), ours.seconds(100)) == (100, 200)


# PACE, Eq. 1
