"""What the benchmark counts as lost: of the published rule, and of ours."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.gtopk_loss import lost_share, ours, published

from syncline.train.sparse.vector import Quota, SparseVector

ROUNDING = 1e-6


def vector(*entries: tuple[int, float]) -> SparseVector:
    dense = np.zeros(4, np.float32)
    for index, value in entries:
        dense[index] = value
    indices = np.flatnonzero(dense).astype(np.uint32)
    return SparseVector(len(dense), indices, dense[indices])


def test_a_value_that_is_dropped_while_its_index_survives_is_lost() -> None:
    """Rank 0's 3 at place 1 gives way to rank 1's 5, and comes through from rank 2."""
    sent = [vector((1, 3.0)), vector((2, 5.0)), vector((1, 9.0)), vector((3, 1.0))]
    delivered, returned = published(sent, Quota((4,), (1,)))
    assert delivered.dense().tolist() == [0, 9, 0, 0]
    assert [back.dense().tolist() for back in returned] == [
        [0, 0, 0, 0],
        [0, 0, 5, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
    ]
    for name in ("gtop-k", "gtop-k-butterfly"):
        delivered, returned = ours(name)(sent, Quota((4,), (1,)))
        assert delivered.dense().tolist() == [0, 9, 0, 0]
        assert sum(back.dense() for back in returned).tolist() == [0, 3, 5, 1]


@pytest.mark.parametrize("name", ["gtop-k", "gtop-k-butterfly"])
@pytest.mark.parametrize("workers", [5, 8, 16])
def test_ours_lose_nothing_where_the_published_rule_does(name: str, workers: int) -> None:
    size = {"elements": 5000, "steps": 3}
    assert lost_share(ours(name), workers, 0.01, 0.5, **size) < ROUNDING
    if workers != 5:
        assert lost_share(published, workers, 0.01, 0.5, **size) > 0.01


def test_two_workers_lose_nothing_by_either() -> None:
    assert lost_share(published, 2, 0.01, 0.5, elements=5000, steps=3) < ROUNDING
