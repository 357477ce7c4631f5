"""Push and pull through parameter servers."""

from __future__ import annotations

import itertools

import pytest

from syncline.errors import UserError
from syncline.plan.collective_costs import server_line
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import Exchange, Link
from tests.plan import steps


def test_rounds_are_counted() -> None:
    for workers, servers in itertools.product(range(2, 9), range(1, 9)):
        rounds = steps.push_rounds(workers, servers)
        line = server_line(workers, 1.0, 0.0, servers=servers)
        assert line.latency_s == rounds
        assert server_line(workers, 0.0, 1.0, servers=servers).seconds(servers) == pytest.approx(
            rounds
        )


def test_by_hand() -> None:
    # P = 8, S = 2: 8 messages of M / 2 at each server, each way; 7 sums of M / 2.
    assert server_line(8, 2.0, 3.0, 5.0, servers=2) == CostCurve.line(16.0, 8 * 3 / 2 + 7 * 5 / 2)
    assert server_line(8, 2.0, 3.0, servers=2) == CostCurve.line(16.0, 12.0)
    link = Link(alpha_s=2.0, beta_s_per_byte=3.0, gamma_s_per_byte=5.0)
    both = Exchange(algorithm="parameter-server", workers=8, link=link, servers=2)
    assert both.curve() == CostCurve.line(32.0, 41.5)


def test_the_link_of_one_server_is_shared() -> None:
    assert server_line(16, 0.0, 1e-9).seconds(10**6) == pytest.approx(16 * 1e-3)


def test_more_servers_than_workers_leave_the_workers_own_link() -> None:
    assert server_line(4, 0.0, 1.0, servers=8).seconds(100) == pytest.approx(100)


def test_one_worker_needs_no_server() -> None:
    assert server_line(1, 1.0, 1.0, 1.0) == CostCurve.line(0.0, 0.0)


def test_servers_on_the_workers_hosts() -> None:
    """One for each of 4 workers: 3 of 4 quarters cross the link, as in a ring."""
    assert server_line(4, 1.0, 8.0, servers=4, colocated=True) == CostCurve.line(3.0, 6.0)
    link = Link(alpha_s=1.0, beta_s_per_byte=8.0, gamma_s_per_byte=0.0)
    sharded = Exchange(algorithm="sharded-parameter-server", workers=4, link=link, colocated=True)
    assert sharded.curve() == CostCurve.line(6.0, 12.0)
    with pytest.raises(UserError, match="5 servers cannot be on the hosts of 4 workers"):
        server_line(4, 1.0, 1.0, servers=5, colocated=True)
    with pytest.raises(UserError, match="ring has no servers"):
        Exchange(algorithm="ring", workers=4, link=link, colocated=True)


def test_no_server() -> None:
    with pytest.raises(UserError, match="parameter servers must be at least 1, found 0"):
        server_line(4, 1.0, 1.0, servers=0)
