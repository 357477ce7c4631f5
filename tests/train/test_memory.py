"""Plans that are remembered: kept for the same training, and never in the way of another."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncline.plan.plan import Plan
from syncline.plan.run import Run
from syncline.train.ddp import DistributedDataParallel
from tests.cases import first_few
from tests.train import jobs
from tests.train.models import Plain
from tests.workers import WorkerPool

Start = tuple[list[str], Run, Plan | None]


def start(
    cache: Any,
    model: type[nn.Module] = Plain,
    samples: int = 6,
    overlaps: bool = True,
    **asked: Any,
) -> Start:
    """Train until measuring is over; return the phases, the record and the plan."""
    ddp = DistributedDataParallel(model(), network=jobs.SLOW, cache=cache, **asked)
    optimizer = jobs.OPTIMIZERS["sgd"](ddp.parameters())
    if overlaps:
        ddp.overlap(optimizer)
    whole = jobs.batch
    batch = mock.patch.object(jobs, "batch", lambda *of: tuple(t[:samples] for t in whole(*of)))
    with jobs.measured_as(jobs.planned_is_faster), batch:
        jobs.steps_to_steady(ddp, optimizer)
    assert ddp.profile is not None
    run = ddp.run_record()
    return [phase.name for phase in run.phases], run, ddp.plan


def starts_twice(folder: str, compression: Any) -> list[Start]:
    """Start the same training twice, where every rank has a folder of its own."""
    return [start(f"{folder}/{dist.get_rank()}", compression=compression) for _ in range(2)]


@pytest.mark.parametrize("compression", first_few([None, "int8", "bfloat16"], 2))
def test_the_second_start_runs_the_plan_of_the_first(
    workers: WorkerPool, tmp_path: Path, compression: Any
) -> None:
    """On all ranks that of rank 0: another host's folder is another one, and may be empty."""
    for first, again in workers.run(starts_twice, 2, str(tmp_path), compression):
        (phases, run, plan), (phases_again, run_again, plan_again) = first, again
        assert phases[0] == "measuring DDP"
        assert phases_again == ["running the saved plan", "recording"]
        assert plan_again == plan is not None
        assert run.decision == run_again.decision == "planned"
        assert run_again.predicted_planned_s == run.predicted_planned_s
    assert len(list((tmp_path / "0").iterdir())) == 1
    assert not (tmp_path / "1").exists()


class Wider(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.more(torch.ones(3)).sum()


def starts_another(folder: str, other: dict[str, Any], keeps: bool) -> list[str]:
    start(folder if keeps else False)
    return start(folder, **other)[0]


OTHERS = ({"samples": 4}, {"model": Wider}, {"planner": "merge"}, {"overlaps": False})
CASES = first_few([({}, False), *((other, True) for other in OTHERS)], 2)


@pytest.mark.parametrize(("other", "keeps"), CASES, ids=str)
def test_another_training_is_measured_anew(
    workers: WorkerPool, tmp_path: Path, other: dict[str, Any], keeps: bool
) -> None:
    for phases in workers.run(starts_another, 2, str(tmp_path), other, keeps):
        assert phases[0] == "measuring DDP"


def starts_once(folder: str) -> tuple[list[str], list[str]]:
    """Start once; return the phases, and what was warned of."""
    with jobs.logged() as records:
        phases, *_ = start(folder)
    return phases, [each.getMessage() for each in records if each.levelno >= logging.WARNING]


DAMAGES = [("a pipe", 2), ("cut", 1), ("other key", 1), ("other kind", 1), ("a link", 1)]
"""A pipe that somebody has put there stays in the way."""


@pytest.mark.parametrize(("damage", "warnings"), first_few([*DAMAGES, ("no plan", 0)], 2))
def test_what_cannot_be_used_is_said_in_a_line(
    workers: WorkerPool, tmp_path: Path, damage: str, warnings: int
) -> None:
    workers.run(starts_once, 2, str(tmp_path))
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    path.unlink()
    if damage == "cut":
        path.write_text(text[:100])
    elif damage == "a pipe":
        os.mkfifo(path)
    elif damage == "a link":
        (tmp_path / "there").write_text(text)
        path.symlink_to(tmp_path / "there")
    else:
        kept = json.loads(text)
        if damage == "other key":
            kept["key"] = "0" * 32
        elif damage == "other kind":
            kept["format"] = "syncline/run"
        else:
            kept["findings"]["planned"] = None
        path.write_text(json.dumps(kept))
    phases, lines = workers.run(starts_once, 2, str(tmp_path))[0]
    assert phases[0] == "measuring DDP"
    assert len(lines) == warnings
    for line in lines[:1]:
        assert line.startswith("syncline: the saved plan is not used: ")
        assert str(path) in line


def test_a_folder_that_cannot_be_written_ends_no_training(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "a file"
    path.write_text("")
    _, lines = workers.run(starts_once, 2, str(path))[0]
    assert any("is not saved for the next start" in line for line in lines)
