"""Ranks end with exit code 0, in time, and leave no process, shared memory or file.

They end as scripts do: in the midst of training, with loaders and groups left as is. Each rank
leads a group of processes, so that the test sees what it has left.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from syncline.train import shutdown
from tests.cases import first_few
from tests.mortal import Ended, Mortals, Place
from tests.timeouts import DEADLINE_S
from tests.train.fault_jobs import WIDTH, begin

RANKS = 2


class Batches(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5, WIDTH), index / 1000)


def train(place: Place, backend: str, how: str) -> None:
    """Train until updates are pending, and end as ``how`` says."""
    training = begin(place, backend=backend)
    if how == "late threads":  # as where the machine is too busy to run them at once
        shutdown.THREADS_S = 0.0
    if how == "loader":
        forked = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        loader = DataLoader(Batches(), batch_size=None, **forked)
        for batch in itertools.islice(loader, 3):
            training.optimizer.zero_grad()
            training.model(batch).square().mean().backward()
            training.optimizer.step()
    with training.pending_step():
        pass
    os.write(1, b"pending\n")  # at once: other ranks write to the same file
    if how == "sys.exit":
        sys.exit(0)
    if how == "group destroyed":
        training.model.synchronize()
        dist.destroy_process_group()


def lead(place: Place) -> None:
    """Lead a group of processes, whose number the test finds in a file."""
    os.setpgid(0, 0)
    tempfile.tempdir = str(place.folder / "temporary")
    (place.folder / f"group-{place.rank}").write_text(str(os.getpid()))


def ends(place: Place, backend: str, how: str) -> None:
    lead(place)
    train(place, backend, how)


def saves_on_request(place: Place, backend: str, how: str) -> None:
    """Train until SIGTERM; save the model and end, as ``how`` says.

    ``how``: "while pending" and "in backward", by the handler at once; "after the step", by the
    loop, which the handler told. Or "never asked": save the model after each of these steps.
    """
    lead(place)
    training = begin(place, backend=backend)
    asked = False

    def save() -> None:
        path = place.folder / f"saved-{place.rank}-{training.done}"
        torch.save(training.model.state_dict(), path)

    def handle(*_: object) -> None:
        nonlocal asked
        asked = True
        if how != "after the step":
            save()
            sys.exit(0)

    def request(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    training.step()
    if how == "never asked":
        save()
    elif how == "while pending":
        request()
    else:
        training.net[-1].weight.register_hook(request)
    training.step()
    assert asked == (how == "after the step")
    save()


def forks_ranks(place: Place, backend: str, by: str) -> None:
    """Fork the ranks from a process that has torch and syncline, and has trained with them."""
    lead(place)
    net = torch.nn.Linear(WIDTH, WIDTH)
    net(torch.ones(5, WIDTH)).sum().backward()
    places = [Place(rank=rank, ranks=RANKS, folder=place.folder) for rank in range(RANKS)]
    if by == "multiprocessing":
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=train, args=(each, backend, "end")) for each in places]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
        print([process.exitcode for process in ranks], flush=True)
        return
    forked = []
    for each in places:
        process = os.fork()
        if process == 0:  # this rank goes on to the end of the script, as a launcher's would
            train(each, backend, "end")
            return
        forked.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in forked]
    print(codes, flush=True)


SHARED = Path("/dev/shm")
Saved = dict[str, dict[str, torch.Tensor]]
Run = Callable[..., tuple[list[Ended], Saved]]


@pytest.fixture(params=["gloo", "syncline"])
def run(mortals: Mortals, request: pytest.FixtureRequest) -> Run:
    """Run a job whose ranks leave nothing; return how they have ended, and what they have saved."""

    def ranks_of(job: Callable[..., None], how: str, ranks: int = RANKS) -> Any:
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


@pytest.mark.parametrize(
    "how", ["end", "sys.exit", "late threads", "loader", *first_few(["group destroyed"], 0)]
)
def test_ranks_end_in_the_midst_of_training(run: Run, how: str) -> None:
    ended, _ = run(ends, how)
    assert [rank.out for rank in ended] == ["pending\n"] * RANKS


@pytest.mark.parametrize("by", ["os.fork", "multiprocessing"])
def test_ranks_are_forked_from_a_process_that_has_torch(run: Run, by: str) -> None:
    [launcher], _ = run(forks_ranks, by, ranks=1)
    assert sorted(launcher.out.splitlines()) == ["[0, 0]", "pending", "pending"]


def test_sigterm_leaves_time_to_save_the_last_step(run: Run) -> None:
    _, expected = run(saves_on_request, "never asked")
    assert len(expected) == 2 * RANKS
    for how in ("while pending", "in backward", "after the step"):
        _, found = run(saves_on_request, how)
        assert len(found) == RANKS
        for name, state in found.items():
            assert state.keys() == expected[name].keys()
            assert all(torch.equal(state[key], expected[name][key]) for key in state), (how, name)
