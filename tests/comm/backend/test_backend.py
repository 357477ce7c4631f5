"""The backend of torch.distributed: what Gloo does, and what Gloo cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import first_few
from tests.comm.backend import backend_jobs as jobs
from tests.workers import WorkerPool

both = pytest.mark.parametrize("ranks", [2, 3])


@both
def test_reductions_are_those_of_gloo(workers: WorkerPool, ranks: int) -> None:
    for differing in workers.run(jobs.reductions, ranks):
        assert differing == []


@both
def test_averages_and_booleans(workers: WorkerPool, ranks: int) -> None:
    for wrong in workers.run(jobs.averages, ranks):
        assert wrong == []


@both
def test_moves_are_those_of_gloo(workers: WorkerPool, ranks: int) -> None:
    for differing in workers.run(jobs.moves, ranks):
        assert differing == []


@both
def test_shards_in_all_their_forms(workers: WorkerPool, ranks: int) -> None:
    for wrong in workers.run(jobs.shards, ranks):
        assert wrong == []


@both
def test_tensors_that_need_preparation_on_some_ranks(workers: WorkerPool, ranks: int) -> None:
    for wrong in workers.run(jobs.prepared_or_not, ranks):
        assert wrong == []


@both
def test_works_and_futures(workers: WorkerPool, ranks: int) -> None:
    for wrong in workers.run(jobs.futures, ranks):
        assert wrong == []


def test_sub_groups_at_once(workers: WorkerPool) -> None:
    # Ranks put in 1, 2 and 3.
    assert workers.run(jobs.sub_groups, 3) == [[3.0, 6.0], [3.0, 5.0, 6.0], [5.0, 6.0]]


def test_what_cannot_be_done_is_said(workers: WorkerPool) -> None:
    expected = {
        "complex": "the reduction 'product' is not for complex numbers",
        "dtype": "backend syncline cannot reduce elements of torch.int16",
        "average": "the reduction 'avg' is for numbers, not for bool",
        "sparse": "exchanges dense tensors on the CPU or CUDA, not torch.sparse_coo on cpu",
        "meta": "on meta",
        "tag": "expected a tag from 0 to 4294967295, found -1",
        "sizes": "a first dimension of 5 cannot be shared out to 2 ranks",
        "monitored": "monitored_barrier is only implemented for GLOO backend",
    }
    for found in workers.run(jobs.refusals, 2):
        for name, words in expected.items():
            assert words in found[name], found[name]


@both
def test_ranks_that_miss_a_monitored_barrier_are_named(workers: WorkerPool, ranks: int) -> None:
    first, *others = workers.run(jobs.monitored_barriers, ranks)
    missing = ["1"] if ranks == 2 else ["1", "1, 2"]
    for which, said in zip(missing, first, strict=False):
        assert f"{which} did not reach the monitored barrier within 0.3 s" in said
    for rank, found in enumerate(others, start=1):
        assert found == ["nothing", "nothing"] or rank == 2
    if ranks == 3:
        assert "reached the monitored barrier, but rank 0 did not let it go on" in others[1][0]


def test_messages_go_by_their_tags_and_come_from_anyone(workers: WorkerPool) -> None:
    for wrong in workers.run(jobs.messages, 3):
        assert wrong == []


def test_an_interrupt_ends_a_wait(workers: WorkerPool) -> None:
    assert workers.run(jobs.interrupted, 2) == ["KeyboardInterrupt", "nothing"]


def test_sequence_numbers_and_timeouts(workers: WorkerPool) -> None:
    for ours, gloos, timeout_s, said in workers.run(jobs.sequence_numbers_and_timeout, 2):
        assert ours == gloos
        assert timeout_s == 0.5
        assert "waited in vain" in said or said == "nothing"


def test_the_profiler_shows_operations(workers: WorkerPool) -> None:
    names = {
        "all_reduce": ("c10d::allreduce_", [[2, 3]]),
        "barrier": ("c10d::barrier", []),
        "all_to_all": ("c10d::alltoall_", [[4]]),
        "all_gather": ("c10d::allgather_", [[2, 3]]),
    }
    for calls, works, ended in workers.run(jobs.profiled_operations, 2):
        assert ended  # else the profiler might free its events before
        assert calls == dict(names.values())
        assert sorted(works) == sorted(f"syncline:{name}" for name in names)


def test_the_transport_can_be_forced_and_the_choices_said(workers: WorkerPool) -> None:
    for found in workers.run(jobs.options, 2):
        near, apart = ((0, 1),), ((0,), (1,))
        assert found["none"] == ["built-in", [near, near], [2.0]]
        assert found["shared"] == ["built-in", [near, near], [2.0]]
        assert found["tcp"] == ["built-in", [apart, apart], [2.0]]
        assert found["ucx"] == ["built-in", [apart, apart], [2.0]]
        assert "expects pg_options of syncline.comm.backend.process_group.Options" in found["class"]
        assert "found dict; give those, or leave them out" in found["class"]
        assert "unknown transport 'udp' (known: auto, shared, tcp, ucx, shared+ucx)" in found["way"]


def test_a_wait_in_vain_ends(workers: WorkerPool) -> None:
    said, _ = workers.run(jobs.timeouts, 2)
    first, _, future = said.partition("; future: ")
    assert "rank 0 waited in vain in all-reduce number 1 of 3 elements of float32" in first
    assert "waited in vain" in future


@pytest.mark.parametrize("transport", ["auto", "tcp", "ucx"])
def test_a_wait_may_be_repeated(workers: WorkerPool, transport: str) -> None:
    first, second = workers.run(jobs.late, 2, transport)
    assert second == []
    assert len(first) == 10
    for said in first:
        assert "rank 0 waited in vain in " in said
        assert "; see that rank's output, or wait again: it is still under way" in said


def test_the_future_of_a_message_holds_up_no_others(workers: WorkerPool) -> None:
    assert workers.run(jobs.early_receive, 3) == [6.0, 6.0, 6.0]


@both
def test_groups_are_made_again(workers: WorkerPool, tmp_path: Path, ranks: int) -> None:
    total = sum(range(1, ranks + 1))
    for rank, found in enumerate(workers.run(jobs.initialized_again, ranks, str(tmp_path))):
        assert found == [total, 2.0 * total] * 2 if rank < 2 else [total] * 2


@both
@pytest.mark.parametrize("name", first_few(jobs.TRAININGS, 3))
def test_training_is_that_on_gloo(workers: WorkerPool, name: str, ranks: int) -> None:
    (_, first), *others = found = workers.run(jobs.trainings, ranks, name)
    assert all(differing == [] for differing, _ in found)
    assert all(bits == first for _, bits in others)


@both
def test_power_sgd_of_several_buckets(workers: WorkerPool, ranks: int) -> None:
    (worst, first), *others = workers.run(jobs.power_sgd_of_several_buckets, ranks)
    assert worst < 0.1  # other buckets, other matrices
    assert all(bits == first for _, bits in others)


@both
def test_overlap_on_the_backend(workers: WorkerPool, ranks: int) -> None:
    (_, first), *others = found = workers.run(jobs.overlapped, ranks)
    assert all(differing == [] for differing, _ in found)
    assert all(bits == first for _, bits in others)


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
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "syncline 3.0\n"), ended.stderr
    assert ended.stderr == ""
