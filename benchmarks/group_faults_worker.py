"""A rank of ``benchmarks.group_faults``: exchanges until another dies, and goes on without it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ranks import on_host
from syncline.comm.groups import Choice, Elements, Group, Transport
from syncline.errors import PeerError

POLL_S = 0.001
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Who dies when, in the middle of what."""

    ranks: int
    transport: Transport
    hosts: tuple[int, ...]
    """On which host each rank takes itself to be."""
    victim: int
    after_s: float
    """Seconds after the ranks have met."""
    elements: int
    algorithm: Choice | None
    idle: bool
    """Whether all ranks are idle when it dies; else they exchange all the time."""


def work(rank: int, folder: Path, trial: Trial) -> None:
    """Run one rank; what a survivor saw goes into ``survivor-RANK``."""
    torch.set_num_threads(1)
    before = _descriptors()
    store = dist.FileStore(str(folder / "notes"), trial.ranks)
    with on_host(trial.hosts[rank]):
        group = Group(store, rank, trial.ranks, timeout_s=TIMEOUT_S, transport=trial.transport)
    exchange(group, trial.elements, trial.algorithm)
    if rank == trial.victim:
        threading.Thread(target=_die, args=(folder, trial.after_s), daemon=True).start()
    try:
        while True:
            while trial.idle and not (folder / "killed").exists():
                time.sleep(POLL_S)
            exchange(group, trial.elements, trial.algorithm)
    except PeerError as error:
        noticed_s, said = time.monotonic(), str(error)
    group.close()
    left = _descriptors() - before
    survivors = [each for each in range(trial.ranks) if each != trial.victim]
    store = dist.FileStore(str(folder / "notes-again"), len(survivors))
    with on_host(trial.hosts[rank]):
        again = Group(
            store,
            survivors.index(rank),
            len(survivors),
            timeout_s=TIMEOUT_S,
            transport=trial.transport,
        )
    exchange(again, trial.elements, trial.algorithm)
    again.close()
    seen = {"noticed_s": noticed_s, "said": said, "descriptors_left": left}
    (folder / f"survivor-{rank}").write_text(json.dumps(seen))


def exchange(group: Group, count: int, choice: Choice | None) -> None:
    """All-reduce ones, and check the result."""
    values = torch.ones(count)
    elements = Elements(values.data_ptr(), count, "float32", values)
    group.all_reduce(elements, choice=choice, blocking=True).wait()
    if not torch.equal(values, torch.full((count,), float(group.ranks))):
        raise AssertionError("the result is wrong")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count


def _die(folder: Path, after_s: float) -> None:
    time.sleep(after_s)
    (folder / "killing").write_text(repr(time.monotonic()))
    (folder / "killing").rename(folder / "killed")
    os.kill(os.getpid(), signal.SIGKILL)
