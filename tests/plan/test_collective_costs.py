"""Costs of all-reduces (MG-WFBP, Table 2) and of parameter servers, held to counted steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from syncline.errors import UserError
from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS, all_reduce_line, server_line
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import Exchange, Link
from tests.plan import steps


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


@pytest.mark.parametrize("algorithm", ALL_REDUCE_ALGORITHMS)
def test_more_workers_never_cost_less(algorithm: str) -> None:
    link = {"alpha_s": 1e-5, "beta_s_per_byte": 1e-9}
    lines = [all_reduce_line(algorithm, workers=n, **link) for n in range(1, 65)]
    costs = [line.seconds(10**6) for line in lines]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        (all_reduce_line, {"algorithm": "rign"}, r"'rign'; did you mean 'ring'\? \(known: binary-"),
        *((all_reduce_line, {"workers": n}, "at least 1 and at most") for n in (0, -3, 10**400)),
        (server_line, {"servers": 0}, "parameter servers must be at least 1, found 0"),
        (server_line, {"servers": 5, "colocated": True}, "5 servers .* the hosts of 4 workers"),
    ],
)
def test_what_is_refused(line: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    algorithm = {"algorithm": "ring"} if line is all_reduce_line else {}
    with pytest.raises(UserError, match=message):
        line(**{**algorithm, "workers": 4, "alpha_s": 1, "beta_s_per_byte": 1, **changes})


def test_servers_by_hand() -> None:
    # P = 8, S = 2: 8 messages of M / 2 at each server, each way, and the last sum of M / 2.
    assert server_line(8, 2.0, 3.0, 1.0, servers=2) == CostCurve.line(16.0, 8 * 3 / 2 + 1 / 2)
    link = Link(alpha_s=2.0, beta_s_per_byte=3.0, gamma_s_per_byte=1.0)
    both = Exchange(algorithm="parameter-server", workers=8, link=link, servers=2)
    assert both.curve() == CostCurve.line(32.0, 24.5)


def test_servers_on_the_workers_hosts() -> None:
    """One for each of 4 workers: 3 of 4 quarters cross the link, as in a ring."""
    assert server_line(4, 1.0, 8.0, servers=4, colocated=True) == CostCurve.line(3.0, 6.0)
    link = Link(alpha_s=1.0, beta_s_per_byte=8.0, gamma_s_per_byte=0.0)
    sharded = Exchange(algorithm="sharded-parameter-server", workers=4, link=link, colocated=True)
    assert sharded.curve() == CostCurve.line(6.0, 12.0)


@pytest.mark.parametrize("workers", [2, 3, 5, 8, 9, 1000])
def test_rounds_are_whole(workers: int) -> None:
    line = all_reduce_line("binary-tree", workers=workers, alpha_s=1, beta_s_per_byte=0)
    assert line.latency_s == 2 * math.ceil(math.log2(workers))


@pytest.mark.parametrize("workers", range(2, 40))
def test_an_all_gather_of_any_number_of_workers_takes_that_many_rounds(workers: int) -> None:
    """So halving/doubling, an all-gather and its reverse, costs what the row says for any N."""
    rounds, blocks = steps.bruck_all_gather(workers)
    line = all_reduce_line("halving-doubling", workers=workers, alpha_s=1, beta_s_per_byte=1)
    assert line.latency_s == 2 * rounds
    assert line.seconds(workers) == pytest.approx(2 * (rounds + blocks))


@pytest.mark.parametrize("workers", range(2, 12))
def test_the_ring_is_counted(workers: int) -> None:
    rounds, blocks = steps.ring_all_reduce(workers)
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
        for algorithm, cost_s in (("double-binary-trees", 100), ("two-tree", 200)):
            line = all_reduce_line(algorithm, workers=workers, alpha_s=0, beta_s_per_byte=1)
            assert line.seconds(100) == cost_s


def test_rounds_and_sums_of_servers_are_counted() -> None:
    for workers, servers in itertools.product(range(2, 9), range(1, 9)):
        for add_s in (0, 1, 5):
            line = server_line(workers, 1.0, 1.0, add_s, servers=servers)
            assert line.latency_s == steps.push_s(workers, servers, 1, 0)
            assert line.seconds(servers) == pytest.approx(steps.push_s(workers, servers, 2, add_s))
