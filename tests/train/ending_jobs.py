"""Ranks that end as scripts do: in the midst of training, with loaders and groups left as is.

Each rank leads a group of processes, so that the test sees what it has left.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from syncline.train.ddp import planned_training
from syncline.train.engine_executor import EngineExecutor
from tests.mortal import DEADLINE_S, Place
from tests.timeouts import TIMEOUT
from tests.train.fault_jobs import WIDTH, Training

RANKS = 2


class Batches(Dataset[torch.Tensor]):
    """Batches that a worker of a loader makes."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5, WIDTH), index / 1000)


def join(folder: Path, rank: int, backend: str) -> None:
    """Let a rank join the others, with the same numbers for its model."""
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=TIMEOUT,
    )
    torch.manual_seed(0)


def train(folder: Path, rank: int, backend: str, how: str) -> None:
    """Train until updates are pending, and end as ``how`` says."""
    join(folder, rank, backend)
    training = Training(Place(rank=rank, ranks=RANKS, folder=folder))
    training.warm()
    if how == "loader":
        loader = DataLoader(
            Batches(),
            batch_size=None,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        for batch in itertools.islice(loader, 3):
            training.optimizer.zero_grad()
            training.model(batch).square().mean().backward()
            training.optimizer.step()
    sent = held(training)
    training.step()
    assert training.pending
    sent.set()
    os.write(1, b"pending\n")  # at once: other ranks write to the same file
    if how == "sys.exit":
        sys.exit(0)
    if how == "group destroyed":
        training.model.synchronize()
        dist.destroy_process_group()


def held(training: Training) -> threading.Event:
    """Hold back the messages of the next step until the event is set."""
    training.model.synchronize()
    engine = planned_training(training.model).reducer.executor
    assert isinstance(engine, EngineExecutor)
    transport, event = engine._engine._transport, threading.Event()
    send = transport.send

    def wait(*args: Any) -> Any:
        assert event.wait(DEADLINE_S)
        return send(*args)

    transport.send = wait  # type: ignore[method-assign]
    return event


def lead(place: Place) -> None:
    """Lead a group of processes, whose number the test finds in a file."""
    os.setpgid(0, 0)
    tempfile.tempdir = str(place.folder / "temporary")
    (place.folder / f"group-{place.rank}").write_text(str(os.getpid()))


def ends(place: Place, backend: str, how: str) -> None:
    """End in the midst of training."""
    lead(place)
    train(place.folder, place.rank, backend, how)


def saves_on_request(place: Place, backend: str, how: str) -> None:
    """Train until SIGTERM; save the model and end, as ``how`` says.

    ``how``: "while pending" and "in backward", by the handler at once; "after the step", by the
    loop, which the handler told. Or "never asked": save the model after each of these steps.
    """
    lead(place)
    join(place.folder, place.rank, backend)
    training = Training(place)
    training.warm()
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
    if by == "multiprocessing":
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=train, args=(place.folder, rank, backend, "end"))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
        print([process.exitcode for process in ranks], flush=True)
        return
    forked = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:  # this rank goes on to the end of the script, as a launcher's would
            train(place.folder, rank, backend, "end")
            return
        forked.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in forked]
    print(codes, flush=True)
