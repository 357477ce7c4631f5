"""A worker finds its place from what torchrun tells it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from syncline.errors import UserError
from syncline.lab.training.group import pick_device, started_by_launcher
from tests.timeouts import DEADLINE_S


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


def test_too_few_gpus_are_refused_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="each of the 2 workers of this host, found 1"):
        pick_device("cuda", 2)


RESIDENT = """
import torch
from syncline.lab.training.group import _keep_freed_memory
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
if {kept}:
    _keep_freed_memory()
blocks = [torch.ones(4 << 20) for _ in range(6)]  # 16 MiB each
before_bytes = resident_bytes()
del blocks
print((before_bytes - resident_bytes()) >> 20)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_freed_memory_is_kept(kept: bool) -> None:
    # A process of its own, whose malloc may be changed.
    command = [sys.executable, "-c", RESIDENT.format(kept=kept)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert (int(ended.stdout) < 16) is kept
