"""What ``make bench-gpu`` measures, on the CPU, and what it says of parts without figures."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.device_collectives import COLLECTIVES, ROUNDS, contests

from benchmarks import gpu
from tests.comm.devices.host_device import HostDevice
from tests.comm.devices.jobs import joined
from tests.workers import WorkerPool

CPU = torch.device("cpu")


def measured(folder: str) -> dict[str, list[dict[str, Any]]]:
    with joined(folder, "contests", HostDevice(folder), block_bytes=4096) as group:
        found = contests(group, "gloo", [1000])
    return {"steps": gpu.step_rows(CPU, 16, rounds=1), "pipeline": found}


@pytest.mark.slow
def test_iterations_and_collectives_are_measured(workers: WorkerPool, tmp_path: Path) -> None:
    for found in workers.run(measured, 2, str(tmp_path)):
        names = [row["name"].split(", ", 1)[1] for row in found["steps"]]
        assert names == ["DDP", "Syncline", "Syncline, overlapped"]
        assert [len(row["rounds"]) for row in found["steps"]] == [1, 1, 1]
        rows = gpu.pipeline_rows(found["pipeline"])
        assert [row["name"] for row in rows] == [
            f"{collective} of 1000 bytes, {name}"
            for collective in COLLECTIVES
            for name in ("syncline", "gloo")
        ]
        assert all(row["value"] > 0 and len(row["rounds"]) == ROUNDS for row in rows)


def test_copies_are_measured() -> None:
    found = gpu.copies("cpu", 1 << 16)
    assert [row["name"] for row in found] == [
        f"65536 bytes {way}, {memory}"
        for memory in ("pageable", "pinned")
        for way in ("to the device", "to the host")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no GPU")
def test_without_a_gpu_it_says_what_would_run() -> None:
    found = {name: gpu.outcome(name, part, time.monotonic()) for name, part in gpu.PARTS.items()}
    assert all(list(each) == ["would run"] for each in found.values())
    parts: dict[str, gpu.Row] = {n: {"about": gpu.PARTS[n].about, **found[n]} for n in found}
    lines = gpu.table(parts)
    assert [line.split()[2] for line in lines] == list(gpu.PARTS)


def test_the_table_says_why_there_is_no_figure() -> None:
    row = {"name": "selection", "value": 2.0, "unit": "times", "at_least": 3.0}
    found: dict[str, gpu.Row] = {
        "one": {"about": "first", "rows": [row]},
        "two": {"about": "second", "failed": "exit code 1"},
        "three": {"about": "third", "skipped": "it needs 2 GPUs, torch 2 finds 1"},
    }
    one, two, three = gpu.table(found)
    assert one.endswith("selection  (target 3: MISSED)")
    assert two.endswith("failed: second: exit code 1")
    assert three.endswith("skipped: third: it needs 2 GPUs, torch 2 finds 1")


def test_a_part_that_does_not_end_is_ended() -> None:
    command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
    with gpu.ended_after(command, 2.0) as (code, said, _):
        assert code is None
        assert said == "begun\n"
