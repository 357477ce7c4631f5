"""A worker finds its place from what torchrun tells it, and knows a lost peer by torch's words."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from syncline.errors import UserError
from syncline.lab.training.group import pick_device, started_by_launcher
from syncline.train.measure.exchange import is_lost_peer
from tests.cases import first_few
from tests.lab.testbed.machine import finished


def test_torchrun_is_recognised() -> None:
    assert started_by_launcher({"RANK": "0", "WORLD_SIZE": "2"})
    assert not started_by_launcher({"WORLD_SIZE": "2"})
    assert not started_by_launcher({})


@pytest.mark.parametrize(
    ("gpus", "asked", "workers", "expected"),
    [
        (0, "auto", 2, "cpu"),
        (1, "auto", 2, "cpu"),
        (2, "auto", 2, "cuda"),
        (2, "cpu", 2, "cpu"),
        (8, "cuda", 2, "cuda"),
    ],
)
def test_gpus_are_taken_where_each_worker_has_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: str, workers: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert pick_device(asked, workers) == expected  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"each of the 9 workers of this host, found {gpus}"):
        pick_device("cuda", 9)


RESIDENT = """
import torch
from syncline.lab.training.group import keep_freed_memory
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
if {kept}:
    keep_freed_memory()
blocks = [torch.ones(4 << 20) for _ in range(6)]  # 16 MiB each
before_bytes = resident_bytes()
del blocks
print((before_bytes - resident_bytes()) >> 20)
"""


@pytest.mark.parametrize("kept", first_few([True, False]))
def test_freed_memory_is_kept(kept: bool) -> None:
    # A process of its own, whose malloc may be changed.
    ended = finished(sys.executable, "-c", RESIDENT.format(kept=kept))
    assert (int(ended.stdout) < 16) is kept


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("NCCL error in: x"), True),
        (RuntimeError("NCCL communicator was aborted on rank 0."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (RuntimeError("CUDA out of memory."), False),
    ],
)
def test_other_errors_are_not_taken_for_lost_peers(error: RuntimeError, expected: bool) -> None:
    assert is_lost_peer(error) is expected
