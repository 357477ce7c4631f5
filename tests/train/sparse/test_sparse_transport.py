"""Exchanges over real process groups."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.sparse_world import run_in_one_process

from syncline.train.sparse.algorithms import ALGORITHMS, Share
from syncline.train.sparse.vector import PRECISIONS, Precision, SparseVector
from tests.cases import first_few
from tests.train.sparse import jobs
from tests.workers import WorkerPool


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_process_group_does_what_the_simulated_world_does(
    workers: WorkerPool, ranks: int, precision: Precision
) -> None:
    found = workers.run(jobs.exchanges, ranks, precision)
    shares: list[Share] = [jobs.share_of(rank, ranks, precision) for rank in range(ranks)]
    for name, algorithm in ALGORITHMS.items():
        for rank, outcome in enumerate(run_in_one_process(algorithm, shares)):
            delivered, returned = found[rank][name]
            assert isinstance(outcome.delivered, SparseVector)
            np.testing.assert_array_equal(delivered, outcome.delivered.dense())
            np.testing.assert_array_equal(returned, outcome.returned.dense())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_in_different_exchanges_are_all_told(
    workers: WorkerPool, ranks: int, name: str
) -> None:
    for said in workers.run(jobs.differing_exchanges, ranks, name, ranks - 1):
        assert "MismatchError" in said or "Refusal(" in said, said


@pytest.mark.parametrize("name", first_few(["gtop-k-butterfly", "gtop-k", "top-k"]))
def test_a_rank_that_does_not_come_is_a_lost_peer(workers: WorkerPool, name: str) -> None:
    first, last = workers.run(jobs.a_rank_that_does_not_come, 2, name)
    assert (
        "PeerError: rank 0 lost a peer while sparse gradients were exchanged with rank 1" in first
    )
    assert last == "absent"
