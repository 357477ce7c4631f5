"""Trainings of which a rank is killed, or stopped, at a random moment.

``tools/kill-ranks`` runs any number of them.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from benchmarks.ranks import on_host
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.comm.groups import Transport
from tests.comm.backend.lost_peer_jobs import Net, sgd, step
from tests.comm.groups.mortal_jobs import initialize
from tests.mortal import Ended, Mortals, Place
from tests.timeouts import POLL_S, give_up

Wrapper = Literal["torch", "syncline"]
Route = Literal["shared", "tcp", "mixed", "gloo"]
"""Over shared memory; over TCP; over both, as on two hosts; over Gloo, to compare."""
TRANSPORTS: dict[Route, Transport | None] = {"tcp": "tcp", "gloo": None}
How = Literal["SIGKILL", "SIGSTOP"]
MOST_STEPS = 120  # by then, ours has left DDP's buckets
LONGEST_S = 0.03  # a few steps
TIMEOUT_S: dict[How, float] = {"SIGKILL": 60.0, "SIGSTOP": 3.0}
"""Of waits; where a rank is stopped, of those that begin after the steps that it makes at least."""
VARIANTS: tuple[dict[str, bool], ...] = (
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"broadcast_buffers": False},
)
HOOKED = {"hooked": True}  # ours refuses communication hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Which rank goes, when, in the middle of what."""

    wrapper: Wrapper
    route: Route
    ranks: int = 2
    victim: int = 1
    steps: int = 5  # how many steps it makes at least; with 0 it may go before its model is wrapped
    after_s: float = 0  # seconds after these steps
    options: dict[str, bool] = field(default_factory=dict)
    """Arguments of the wrapper, and whether a communication hook is registered."""
    how: How = "SIGKILL"


def drawn(number: int, wrapper: Wrapper) -> Kill:
    """Return a random kill, the same whenever it is asked for."""
    chance = random.Random(f"{number} {wrapper}")
    ranks = chance.choice((2, 3))
    return Kill(
        wrapper=wrapper,
        route=chance.choice(("shared", "shared", "tcp", "mixed")),
        ranks=ranks,
        victim=chance.randrange(ranks),
        steps=chance.choice((0, chance.randrange(10), *2 * [chance.randrange(MOST_STEPS)])),
        after_s=chance.uniform(0, LONGEST_S),
        options=chance.choice(VARIANTS if wrapper == "syncline" else (*VARIANTS, HOOKED)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How it went."""

    steps: int  # of the victim
    ended_s: list[float]  # after how many seconds each survivor had ended
    said: list[str]  # the last line of each survivor's error output
    failures: list[str]  # what survivors did wrong: ended by a signal, or did not name the rank


def run(mortals: Mortals, kill: Kill, folder: Path) -> Found:
    """Run a training in an empty folder; return how its survivors have ended, unless one hangs."""
    ended = mortals.run(trains_until_it_ends, kill.ranks, asdict(kill), folder=folder)
    if not (folder / "moment").exists():
        failures = [f"rank {rank}: {each.err}" for rank, each in enumerate(ended)]
        return Found(steps=0, ended_s=[], said=[], failures=["too early:", *failures])
    moment = json.loads((folder / "moment").read_text())
    survivors = [rank for rank in range(kill.ranks) if rank != kill.victim]
    return Found(
        steps=moment["steps"],
        ended_s=[ended[rank].at_s - moment["at_s"] for rank in survivors],
        said=[(ended[rank].err.strip().splitlines() or ["not a word"])[-1] for rank in survivors],
        failures=[
            f"rank {rank} ended with {ended[rank].code}: {ended[rank].err or 'not a word'}"
            for rank in survivors
            if not _names(ended[rank], kill.victim)
        ],
    )


def _names(ended: Ended, victim: int) -> bool:
    """Say whether a survivor's script ended by an error of ours that names the victim."""
    error = rf"^(\[rank\d\]: )?syncline\.errors\.PeerError: .*\brank {victim}\b"
    return ended.code == 1 and re.search(error, ended.err, re.MULTILINE) is not None


class Going:
    """The victim's end at its moment."""

    def __init__(self, place: Place, kill: Kill) -> None:
        self._steps = 0
        self._folder, self._kill = place.folder, kill
        if kill.how == "SIGSTOP":
            self._end_with_the_others(place)

    def done(self, steps: int) -> None:
        """Note that so many steps are done; after those of the kill, its seconds begin to run."""
        self._steps = steps
        if steps == self._kill.steps:
            threading.Thread(target=self._go, daemon=True).start()

    def _go(self) -> None:
        time.sleep(self._kill.after_s)
        moment = {"at_s": time.monotonic(), "steps": self._steps}
        (self._folder / "moment").write_text(json.dumps(moment))
        os.kill(os.getpid(), getattr(signal, self._kill.how))

    def _end_with_the_others(self, place: Place) -> None:
        """Let a child kill this process, which will be stopped, once the other ranks have ended."""
        others = [place.folder / f"process-{rank}" for rank in range(place.ranks)]
        del others[place.rank]
        parent = os.getpid()
        if os.fork():
            return
        while not all(path.exists() and _has_ended(path.read_text()) for path in others):
            time.sleep(POLL_S)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)


def _has_ended(process: str) -> bool:
    return process != "" and not Path(f"/proc/{process}").exists()


def trains_until_it_ends(place: Place, given: dict[str, Any]) -> None:
    """Train until the victim goes, which ends the others by an error."""
    kill = Kill(**given)
    (place.folder / f"process-{place.rank}").write_text(str(os.getpid()))
    going = Going(place, kill) if place.rank == kill.victim else None
    with on_host(place.rank % 2) if kill.route == "mixed" else nullcontext():
        timeout = timedelta(seconds=TIMEOUT_S["SIGKILL"])
        initialize(place, TRANSPORTS.get(kill.route, "auto"), timeout)
        if going is not None:
            going.done(0)
        model = _wrapped(kill)
        optimizer = sgd(model)
        for steps in itertools.count(1):
            step(model, optimizer)
            if steps == kill.steps:
                give_up(dist.group.WORLD, TIMEOUT_S[kill.how])
            if going is not None:
                going.done(steps)


def _wrapped(kill: Kill) -> Any:
    wrapper: Any = DistributedDataParallel
    if kill.wrapper == "syncline":
        wrapper = syncline.DistributedDataParallel
    torch.manual_seed(0)
    options = dict(kill.options)
    hooked = options.pop("hooked", False)
    model = wrapper(Net(), bucket_cap_mb=0.02, **options)
    if hooked:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model
