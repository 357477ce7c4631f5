"""Broadcast and reduce of linear-pipeline's Table 1."""

from __future__ import annotations

import pytest
from reproduce.paper_costs import BROADCAST_ALGORITHMS, REDUCE_ALGORITHMS

from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS
from tests.plan import steps


@pytest.mark.parametrize(
    ("algorithm", "a_s", "b_s_per_byte"),
    [
        # p = 8, alpha = 2, beta = 3, gamma = 5, so log p = 3.
        ("minimum-spanning-tree", 6.0, 9.0),  # 3 * 2;  3 * 3
        ("bidirectional-exchange", 12.0, 5.25),  # 2 * 3 * 2;  2 * 7 / 8 * 3
        ("scatter-ring", 20.0, 5.25),  # (3 + 7) * 2, as printed;  2 * 7 / 8 * 3
    ],
)
def test_broadcast_by_hand(algorithm: str, a_s: float, b_s_per_byte: float) -> None:
    assert BROADCAST_ALGORITHMS[algorithm](8, 2, 3, 5) == (a_s, b_s_per_byte)


@pytest.mark.parametrize(
    ("algorithm", "a_s", "b_s_per_byte"),
    [
        ("minimum-spanning-tree", 6.0, 24.0),  # 3 * 2;  3 * (3 + 5)
        ("bidirectional-exchange", 12.0, 9.625),  # 2 * 3 * 2;  7 / 8 * (2 * 3 + 5)
    ],
)
def test_reduce_by_hand(algorithm: str, a_s: float, b_s_per_byte: float) -> None:
    assert REDUCE_ALGORITHMS[algorithm](8, 2, 3, 5) == (a_s, b_s_per_byte)


def test_tree_rounds_are_counted() -> None:
    for workers in range(2, 40):
        rounds = steps.binomial_broadcast(workers)
        assert BROADCAST_ALGORITHMS["minimum-spanning-tree"](workers, 1, 0, 0)[0] == rounds


def test_the_erratum_of_the_exchange_broadcast() -> None:
    """Both all-gathers of the paper's proof exist; only the doubling one takes log p rounds."""
    for workers in range(2, 40):
        rounds, _ = steps.bruck_all_gather(workers)
        scatter = steps.binomial_broadcast(workers)
        assert (
            BROADCAST_ALGORITHMS["bidirectional-exchange"](workers, 1, 0, 0)[0] == scatter + rounds
        )
        assert BROADCAST_ALGORITHMS["scatter-ring"](workers, 1, 0, 0)[0] == scatter + workers - 1


@pytest.mark.parametrize("workers", [2, 3, 8, 100])
def test_the_all_reduces_of_the_table_are_those_of_mg_wfbp(workers: int) -> None:
    numbers = (workers, 2.0, 3.0, 5.0)
    reduce, broadcast = (
        t["minimum-spanning-tree"] for t in (REDUCE_ALGORITHMS, BROADCAST_ALGORITHMS)
    )
    both = [x + y for x, y in zip(reduce(*numbers), broadcast(*numbers), strict=True)]
    assert both == pytest.approx(list(ALL_REDUCE_ALGORITHMS["binary-tree"](*numbers)))
    # The bidirectional exchange's reduce and all-reduce are printed alike.
    exchange = REDUCE_ALGORITHMS["bidirectional-exchange"](*numbers)
    assert exchange == pytest.approx(ALL_REDUCE_ALGORITHMS["halving-doubling"](*numbers))
