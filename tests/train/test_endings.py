"""Ranks end with exit code 0, in time, and leave no process, shared memory or file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import first_few
from tests.mortal import Ended, Mortals
from tests.train import ending_jobs as jobs

SHARED = Path("/dev/shm")
Saved = dict[str, dict[str, torch.Tensor]]
Run = Callable[..., tuple[list[Ended], Saved]]


@pytest.fixture(params=["gloo", "syncline"])
def run(mortals: Mortals, request: pytest.FixtureRequest) -> Run:
    """Run a job whose ranks leave nothing; return how they have ended, and what they have saved."""

    def ranks_of(job: Callable[..., None], how: str, ranks: int = jobs.RANKS) -> Any:
        # Its path leaves room in that of a socket, which may have 107 characters.
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "temporary").mkdir()
            ended = mortals.run(job, ranks, request.param, how, folder=folder)
            assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * ranks
            leaders = [int((folder / f"group-{rank}").read_text()) for rank in range(ranks)]
            for leader in leaders:
                with pytest.raises(ProcessLookupError):
                    os.killpg(leader, 0)
            shared = [each.name for each in SHARED.iterdir()]
            assert not [name for name in shared if any(f"_{leader}_" in name for leader in leaders)]
            ours = {f"{kind}-{rank}" for rank in range(ranks) for kind in ("out", "err", "group")}
            saved = {path.name: torch.load(path) for path in folder.glob("saved-*")}
            found = {path.name for path in folder.iterdir()}
            assert found <= {*ours, *saved, "temporary", "store"}
            assert not list((folder / "temporary").iterdir())
        return ended, saved

    return ranks_of


@pytest.mark.parametrize("how", ["end", "sys.exit", "loader", *first_few(["group destroyed"], 0)])
def test_ranks_end_in_the_midst_of_training(run: Run, how: str) -> None:
    ended, _ = run(jobs.ends, how)
    assert [rank.out for rank in ended] == ["pending\n"] * jobs.RANKS


@pytest.mark.parametrize("by", ["os.fork", "multiprocessing"])
def test_ranks_are_forked_from_a_process_that_has_torch(run: Run, by: str) -> None:
    [launcher], _ = run(jobs.forks_ranks, by, ranks=1)
    assert sorted(launcher.out.splitlines()) == ["[0, 0]", "pending", "pending"]


def test_sigterm_leaves_time_to_save_the_last_step(run: Run) -> None:
    _, expected = run(jobs.saves_on_request, "never asked")
    assert len(expected) == 2 * jobs.RANKS
    for how in ("while pending", "in backward", "after the step"):
        _, found = run(jobs.saves_on_request, how)
        assert len(found) == jobs.RANKS
        for name, state in found.items():
            assert state.keys() == expected[name].keys()
            assert all(torch.equal(state[key], expected[name][key]) for key in state), (how, name)
