"""CUDA tensors on the backend: results, and which way they go, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm.backend import gpu_jobs
from tests.workers import WorkerPool


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_of_a_host_reduce_and_broadcast_between_gpus(
    workers: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    for found in workers.run(gpu_jobs.operations, ranks, str(tmp_path), "syncline", "auto"):
        assert found["differences"] == []
        assert found["linear"] == ["all-reduce", "broadcast", "reduce"]


def test_between_hosts_everything_is_staged(workers: WorkerPool, tmp_path: Path) -> None:
    """Ranks that are joined by UCX alone count as a host each."""
    for found in workers.run(gpu_jobs.operations, 2, str(tmp_path), "syncline", "ucx"):
        assert found["differences"] == []
        assert found["linear"] == []


def test_another_backend_may_serve_cuda(workers: WorkerPool, tmp_path: Path) -> None:
    """Gloo, in the place of NCCL, which needs a GPU."""
    backend = "cpu:syncline,cuda:gloo"
    for found in workers.run(gpu_jobs.operations, 2, str(tmp_path), backend, "auto"):
        assert found["differences"] == []
        assert found["linear"] == []


def test_a_group_without_a_backend_for_cuda_says_so(workers: WorkerPool) -> None:
    for said in workers.run(gpu_jobs.without_a_backend, 2):
        assert said.startswith("this process group was made as 'cpu:syncline', with no backend for")
        assert "'cpu:syncline,cuda:nccl'" in said
