"""Ranks end with exit code 0, in time, and leave no process, shared memory or file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import first_few
from tests.mortal import Ended, Mortals
from tests.train import ending_jobs as jobs

BACKENDS = ["gloo", "syncline"]
SHARED = Path("/dev/shm")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder that leaves room in the path of a socket, which may have 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def run(
    mortals: Mortals, job: Callable[..., None], ranks: int, folder: Path, *args: Any
) -> list[Ended]:
    """Run a job, and check that its ranks have left nothing."""
    (folder / "temporary").mkdir()
    ended = mortals.run(job, ranks, *args, folder=folder)
    leaders = [int((folder / f"group-{rank}").read_text()) for rank in range(ranks)]
    for leader in leaders:
        with pytest.raises(ProcessLookupError):
            os.killpg(leader, 0)
    shared = [each.name for each in SHARED.iterdir()]
    assert not [name for name in shared if any(f"_{leader}_" in name for leader in leaders)]
    ours = {f"{kind}-{rank}" for rank in range(ranks) for kind in ("out", "err", "group")}
    found = {path.name for path in folder.iterdir() if not path.name.startswith("saved-")}
    assert found <= {*ours, "temporary", "store"}
    assert not list((folder / "temporary").iterdir())
    return ended


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["end", "sys.exit", "loader", *first_few(["group destroyed"], 0)])
def test_ranks_end_in_the_midst_of_training(
    mortals: Mortals, short_path: Path, backend: str, how: str
) -> None:
    for rank in run(mortals, jobs.ends, jobs.RANKS, short_path, backend, how):
        assert (rank.code, rank.err, rank.out) == (0, "", "pending\n")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by", ["os.fork", "multiprocessing"])
def test_ranks_are_forked_from_a_process_that_has_torch(
    mortals: Mortals, short_path: Path, backend: str, by: str
) -> None:
    [launcher] = run(mortals, jobs.forks_ranks, 1, short_path, backend, by)
    assert (launcher.code, launcher.err) == (0, "")
    assert sorted(launcher.out.splitlines()) == ["[0, 0]", "pending", "pending"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigterm_leaves_time_to_save_the_last_step(
    mortals: Mortals, tmp_path: Path, backend: str
) -> None:
    def saved(how: str) -> dict[str, dict[str, torch.Tensor]]:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            for rank in run(mortals, jobs.saves_on_request, jobs.RANKS, Path(folder), backend, how):
                assert (rank.code, rank.err) == (0, ""), how
            return {path.name: torch.load(path) for path in Path(folder).glob("saved-*")}

    expected = saved("never asked")
    assert len(expected) == 2 * jobs.RANKS
    for how in ("while pending", "in backward", "after the step"):
        found = saved(how)
        assert len(found) == jobs.RANKS
        for name, state in found.items():
            assert state.keys() == expected[name].keys()
            assert all(torch.equal(state[key], expected[name][key]) for key in state), (how, name)
