"""What runs on the hosts of ``sparse_speed``, on two workers of this host."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.sparse_models import PAPER
from benchmarks.sparse_worker import DENSE, exchanging, training

from tests.workers import WorkerPool

JOB = {"iterations": 1, "repetitions": 1}


def take_turns() -> list[dict[str, Any]]:
    published = PAPER["resnet20"]
    return [
        training(published, DENSE, JOB),
        training(published, "gtop-k-butterfly", JOB),
        exchanging(published, "gtop-k-butterfly", JOB),
    ]


def test_turns_are_timed(workers: WorkerPool) -> None:
    for dense, sparse, exchange in workers.run(take_turns, 2):
        assert len(dense["iterations_s"]) == len(sparse["iterations_s"]) == 1
        assert sparse["compress_s"] > 0
        assert sparse["communicate_s"] > 0
        assert exchange["exchanges_s"][0] > 0
        assert exchange["entries"] == pytest.approx(0.001 * 269_722, rel=0.25)
