"""Plans that are remembered: kept for the same training, and never in the way of another."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from tests.train import memory_jobs as jobs
from tests.workers import WorkerPool


def test_the_second_start_runs_the_plan_of_the_first(workers: WorkerPool, tmp_path: Path) -> None:
    first, again = workers.run(jobs.starts_twice, 2, str(tmp_path))[0]
    assert first["phases"][:2] == ["starting", "measuring DDP"]
    assert (first["decision"], again["decision"]) == ("planned", "planned")
    assert again["phases"] == ["starting", "running the saved plan", "recording", "steady"]
    assert again["plan"] == first["plan"]
    assert again["predicted_s"] == first["predicted_s"]
    assert again["profiled"]
    assert len(list(tmp_path.iterdir())) == 1


def test_all_ranks_run_what_rank_0_remembers(workers: WorkerPool, tmp_path: Path) -> None:
    """Another host's folder is another one, and may be empty."""
    for first, again in workers.run(jobs.starts_twice_with_a_folder_each, 2, str(tmp_path)):
        assert again["phases"][1] == "running the saved plan"
        assert again["plan"] == first["plan"]
    assert [len(list((tmp_path / rank).iterdir())) for rank in "0"] == [1]
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize("other", ["model", "batch", "planner", "optimizer", "nothing kept"])
def test_another_training_is_measured_anew(workers: WorkerPool, tmp_path: Path, other: str) -> None:
    for _, again in workers.run(jobs.starts_another, 2, str(tmp_path), other):
        assert again["phases"][1] == "measuring DDP"


@pytest.mark.parametrize(
    "damage", ["cut", "other key", "other kind", "a pipe", "a link", "no plan"]
)
def test_what_cannot_be_used_is_said_in_a_line(
    workers: WorkerPool, tmp_path: Path, damage: str
) -> None:
    workers.run(jobs.starts_twice, 2, str(tmp_path))
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
    phases, said = workers.run(jobs.starts_once, 2, str(tmp_path))[0]
    assert phases[1] == "measuring DDP"
    lines = [text for level, text in said if level >= logging.WARNING]
    # A pipe that somebody has put there stays in the way.
    expected = {"no plan": 0, "a pipe": 2}.get(damage, 1)
    assert len(lines) == expected
    for line in lines[:1]:
        assert line.startswith("the saved plan is not used: ")
        assert str(path) in line


def test_a_folder_that_cannot_be_written_ends_no_training(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "a file"
    path.write_text("")
    phases, said = workers.run(jobs.starts_once, 2, str(path))[0]
    assert phases[-1] == "steady"
    assert any("is not saved for the next start" in text for _, text in said)
