"""Exchanges over real process groups."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist
from benchmarks.sparse_world import run_in_one_process

from syncline.train.sparse.algorithms import ALGORITHMS, ExchangeOutcome, Share
from syncline.train.sparse.sparse_transport import SparseTransport
from syncline.train.sparse.vector import PRECISIONS, Precision, Quota, rounded
from syncline.train.sparse.wire import WireFormat
from tests.cases import first_few
from tests.timeouts import TIMEOUT
from tests.train.sparse.jobs import telling
from tests.train.sparse.vectors import assert_same, largest
from tests.workers import WorkerPool

LENGTH, K = 1000, 37


def share_of(rank: int, ranks: int, precision: Precision) -> Share:
    """Return what a rank takes part with, the same in every process."""
    values = np.random.default_rng(rank).standard_normal(LENGTH, np.float32)
    own, _ = rounded(largest(values, K), precision)
    return Share(rank, ranks, own, Quota((LENGTH,), (K,)), precision)


def transport_of(timeout: timedelta = TIMEOUT) -> SparseTransport:
    return SparseTransport(dist.new_group(timeout=TIMEOUT), timeout)


def run_on(
    transport: SparseTransport, name: str, precision: Precision = "float32", digest: int = 5
) -> ExchangeOutcome:
    wire = WireFormat(k=K, length=LENGTH, precision=precision, digest=digest)
    share = share_of(transport.rank, transport.ranks, precision)
    return transport.run(ALGORITHMS[name], share, wire)


def exchanges(precision: Precision) -> dict[str, ExchangeOutcome]:
    transport = transport_of()
    return {name: run_on(transport, name, precision) for name in ALGORITHMS}


@telling
def differing_exchanges(name: str, differing: int) -> str:
    """Return what is delivered where one rank is in another exchange."""
    transport = transport_of()
    digest = 6 if transport.rank == differing else 5
    return str(run_on(transport, name, digest=digest).delivered)


@telling
def a_rank_that_does_not_come(name: str) -> str:
    transport = transport_of(timedelta(seconds=1))
    if transport.rank == transport.ranks - 1:
        return "absent"
    return str(run_on(transport, name))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_as_in_the_simulated_world(workers: WorkerPool, ranks: int, precision: Precision) -> None:
    found = workers.run(exchanges, ranks, precision)
    shares = [share_of(rank, ranks, precision) for rank in range(ranks)]
    for name, algorithm in ALGORITHMS.items():
        for rank, outcome in enumerate(run_in_one_process(algorithm, shares)):
            assert_same(found[rank][name].delivered, outcome.delivered)
            assert_same(found[rank][name].returned, outcome.returned)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_in_other_exchanges_are_told(workers: WorkerPool, ranks: int, name: str) -> None:
    for said in workers.run(differing_exchanges, ranks, name, ranks - 1):
        assert "MismatchError" in said or "Refusal(" in said, said


@pytest.mark.parametrize("name", first_few(["gtop-k-butterfly", "gtop-k", "top-k"]))
def test_a_rank_that_does_not_come_is_a_lost_peer(workers: WorkerPool, name: str) -> None:
    first, last = workers.run(a_rank_that_does_not_come, 2, name)
    assert "PeerError: rank 0 lost a peer while sparse" in first
    assert "with rank 1" in first
    assert last == "absent"
