"""Push and pull through parameter servers."""

from __future__ import annotations

import itertools

import pytest

from syncline.errors import UserError
from syncline.model.collective_costs import pull_line, push_line, server_formula
from syncline.model.cost import CostCurve
from tests.model import steps


def test_rounds_are_counted() -> None:
    for workers, servers in itertools.product(range(2, 9), range(1, 9)):
        rounds = steps.push_rounds(workers, servers)
        line = push_line(workers, 1.0, 0.0, servers=servers)
        assert line.startup_s == rounds
        assert pull_line(workers, 0.0, 1.0, servers=servers).seconds(servers) == pytest.approx(
            rounds
        )


def test_by_hand() -> None:
    # P = 8, S = 2: 8 messages of M / 2 at each server, each way; 7 sums of M / 2.
    assert push_line(8, 2.0, 3.0, 5.0, servers=2) == CostCurve.line(16.0, 8 * 3 / 2 + 7 * 5 / 2)
    assert pull_line(8, 2.0, 3.0, servers=2) == CostCurve.line(16.0, 12.0)
    assert server_formula(2)(8, 2.0, 3.0, 5.0) == (32.0, 41.5)


def test_the_link_of_one_server_is_shared() -> None:
    assert push_line(16, 0.0, 1e-9).seconds(10**6) == pytest.approx(16 * 1e-3)


def test_more_servers_than_workers_leave_the_workers_own_link() -> None:
    assert push_line(4, 0.0, 1.0, servers=8).seconds(100) == pytest.approx(100)


def test_one_worker_needs_no_server() -> None:
    assert server_formula(1)(1, 1.0, 1.0, 1.0) == (0, 0)


def test_no_server() -> None:
    with pytest.raises(UserError, match="at least 1 is needed, found 0"):
        push_line(4, 1.0, 1.0, servers=0)
