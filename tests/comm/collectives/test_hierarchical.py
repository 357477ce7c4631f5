"""All-reduce of ranks that share hosts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.collectives import hierarchical
from syncline.errors import UserError
from tests.comm.collectives.proof import verify


def placed(sizes: list[int]) -> list[list[int]]:
    numbers = itertools.count()
    return [[next(numbers) for _ in range(size)] for size in sizes]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms())
def test_any_hosts_are_summed_right_and_alike(sizes: list[int], random) -> None:
    ranks = list(range(sum(sizes)))
    random.shuffle(ranks)
    hosts = [[ranks[place] for place in host] for host in placed(sizes)]
    verified = verify(hierarchical(hosts), window=1)
    assert verified.identical


def test_between_hosts_every_byte_goes_as_in_a_ring_of_hosts() -> None:
    hosts = placed([4, 4, 4])
    schedule = hierarchical(hosts)
    host_of = np.repeat(np.arange(3), 4)
    between = host_of[schedule.source] != host_of[schedule.destination]
    blocks = (schedule.block_stop - schedule.block_start)[between]
    sent = np.bincount(host_of[schedule.source[between]], weights=blocks) / schedule.blocks
    assert sent == pytest.approx([2 * 2 / 3] * 3)


def test_one_rank_a_host_is_a_ring() -> None:
    assert hierarchical([[0], [1], [2]]).steps == 4


@pytest.mark.parametrize("hosts", [[], [[0], []], [[0, 1], [1]], [[0], [2]]])
def test_hosts_that_cannot_be(hosts: list[list[int]]) -> None:
    with pytest.raises(UserError, match="every rank from 0 on exactly once"):
        hierarchical(hosts)
