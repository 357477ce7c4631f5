"""The backend of torch.distributed: what Gloo does, and what Gloo cannot do."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import first_few
from tests.comm.backend import backend_jobs as jobs
from tests.comm.backend import gpu_jobs
from tests.programs import ran
from tests.workers import WorkerPool

both = pytest.mark.parametrize("ranks", [2, 3])
ON_BOTH = (
    jobs.like_gloo,
    jobs.averages,
    jobs.shards,
    jobs.prepared_or_not,
    jobs.futures,
    jobs.monitored_barriers,
    jobs.power_sgd_of_several_buckets,
)


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        *itertools.product(ON_BOTH, (2, 3)),
        (jobs.refusals, 2),
        (jobs.interrupted, 2),
        (jobs.sequence_numbers, 2),
        (jobs.profiled_operations, 2),
        (jobs.options, 2),
        (jobs.timeouts, 2),
        (jobs.messages, 3),
        (jobs.early_receive, 3),
    ],
)
def test_what_torch_asks_of_it(workers: WorkerPool, job: Callable[[], None], ranks: int) -> None:
    workers.run(job, ranks)


@pytest.mark.parametrize("transport", ["auto", "tcp", "ucx"])
def test_a_wait_may_be_repeated(workers: WorkerPool, transport: str) -> None:
    workers.run(jobs.late, 2, transport)


@both
def test_groups_are_made_again(workers: WorkerPool, tmp_path: Path, ranks: int) -> None:
    workers.run(jobs.initialized_again, ranks, str(tmp_path))


@both
@pytest.mark.parametrize("name", first_few(jobs.TRAININGS, 3))
def test_training_is_that_on_gloo(workers: WorkerPool, name: str, ranks: int) -> None:
    workers.run(jobs.trainings, ranks, name)


@pytest.mark.parametrize("line", first_few(["", "import syncline"]))
def test_torch_finds_it_by_itself(tmp_path: Path, line: str) -> None:
    script = f"""
{line}
import torch, torch.distributed as dist
dist.init_process_group("syncline", init_method="file://{tmp_path}/store", rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.barrier()
print(dist.get_backend(), tensor.sum().item())
"""
    ended = ran(sys.executable, "-W", "error", "-c", script)
    assert (ended.returncode, ended.stdout) == (0, "syncline 3.0\n"), ended.stderr
    assert ended.stderr == ""


# ---------------------------------------------------------------------- CUDA tensors, without a GPU


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gpus_of_a_host_reduce_directly(workers: WorkerPool, tmp_path: Path, ranks: int) -> None:
    for linear in workers.run(gpu_jobs.like_gloo, ranks, str(tmp_path), "syncline", "auto"):
        assert linear == ["all-reduce", "broadcast", "reduce"]


@pytest.mark.parametrize(
    ("backend", "transport"),
    [
        ("syncline", "ucx"),  # ranks that are joined by UCX alone count as a host each
        ("cpu:syncline,cuda:gloo", "auto"),  # Gloo, in the place of NCCL, which needs a GPU
    ],
)
def test_between_hosts_and_by_another_backend_nothing_is_linear(
    workers: WorkerPool, tmp_path: Path, backend: str, transport: str
) -> None:
    found = workers.run(gpu_jobs.like_gloo, 2, str(tmp_path), backend, transport)
    assert found == [[], []]


def test_a_group_without_a_backend_for_cuda_says_so(workers: WorkerPool) -> None:
    workers.run(gpu_jobs.without_a_backend, 2)
