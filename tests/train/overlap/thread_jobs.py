"""What the workers of the tests of reading threads run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel

from syncline.errors import SynclineError
from syncline.train.ddp import planned_training
from syncline.train.overlap import pending
from tests.train.overlap.loop import Loop
from tests.train.overlap.overlap_jobs import attempted, script_beside_ddp
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import (
    DEADLINE_S,
    STEADY,
    Ours,
    Side,
    fingerprint,
    holding,
    patched,
)
from tests.train.overlap.overlap_threads import reads_without_end
from tests.train.overlap.own_optimizers import Custom

PATIENCE_S = 0.1
"""So long an update is held half made. What must wait for it cannot be seen to wait for ever."""
HALTS = range(STEADY + 1, STEADY + 10, 4)  # the steps whose updates are held


def halfway() -> None:
    """Do something in the middle of an update. Attributes of an optimizer would be tried out."""


HERE = sys.modules[__name__]


class Halves(Custom):
    """Updates the first half of each parameter and its state, then the second."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        total = self.state[p].setdefault("sum", torch.zeros_like(p)).view(-1)
        cut = total.numel() // 2
        for part in (slice(cut), slice(cut, None)):
            total[part] += p.grad.view(-1)[part]
            p.detach().view(-1)[part] -= group["lr"] * total[part].sign()
            halfway()


def reads_beside_ddp(make: str, reads: list[str]) -> dict[str, Any]:
    """Train beside threads that read, under DDP and under the engine."""
    forced: list[Any] = []

    def script(side: Side) -> None:
        reads_without_end(side, make, reads)
        if isinstance(side, Ours):
            forced.append(planned_training(side.wrapped[0]).reducer.executor.forced_syncs())

    result = script_beside_ddp(partial(attempted, script), Style(), 0.3, steps=40)
    return {**result, "forced": forced[0] if forced else "raised"}


def forward_beside_an_update(mutant: bool) -> list[str]:
    """Say how training differs whose updates a thread makes; the mutant makes them without lock."""
    modules = [m for n, m in sys.modules.items() if n.startswith("syncline.train.overlap.")]
    locking = [module for module in modules if mutant and hasattr(module, "UPDATES")]
    pending.keep_updates_whole_in_forks()  # with the real lock
    try:
        with patched({(module, "UPDATES"): nullcontext() for module in locking}):
            found = script_beside_ddp(_forward_beside_an_update, Style(), 0.0)
    except (SynclineError, RecursionError) as error:
        if not mutant:
            raise
        return [str(error)]
    return list(found["differences"])


def _forward_beside_an_update(side: Side) -> None:
    t = Loop(make=Halves).begin(side)
    schedule = ExponentialLR(t.optimizer, 0.9)
    weight = t.net.hidden.weight
    begun, over = threading.Event(), threading.Event()
    reader = threading.Thread()

    def halt() -> None:
        if threading.current_thread() is reader and not begun.is_set():
            begun.set()
            over.wait(PATIENCE_S)

    def read() -> None:
        with suppress(AttributeError):  # without the lock ``zero_grad`` takes the gradients away
            weight.detach().sum()

    with patched({(HERE, "halfway"): halt}):
        for step in side.steps:
            t.optimizer.zero_grad()
            try:
                loss = t.loss()
            finally:
                over.set()
                if reader.ident is not None:
                    reader.join(DEADLINE_S)
            t.backward(loss)
            t.optimizer.step()
            if step in HALTS:
                begun.clear()
                over.clear()
                reader = threading.Thread(target=read)
                reader.start()
                while reader.is_alive() and not begun.wait(0.001):
                    pass
                assert begun.is_set() or not isinstance(side, Ours), "no update to be made"
            schedule.step()
    side.finish(t.ddp, t.optimizer)


def reads_beside_an_update() -> dict[str, tuple[Any, Any]]:
    """Return what threads read in the middle of an update, and what is there when it is over."""
    side = Ours(Style())
    seen: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    with holding(0.0):
        t = Loop(make=Halves).begin(side)
        mean = AveragedModel(t.net)
        weight, averaged = t.net.enter.weight, mean.module.enter.weight
        reads: dict[str, Callable[[], Any]] = {
            "parameter": weight.clone,
            "state": lambda: t.optimizer.state[weight]["sum"].clone(),
            "gradient": lambda: weight.grad.clone(),
            "average": averaged.clone,
        }

        def note(name: str) -> None:
            seen[name] = fingerprint(reads[name]().detach())

        threads = [threading.Thread(target=note, args=(name,)) for name in reads]

        def halt() -> None:
            if side.step == HALTS[0] + 1 and threads[0].ident is None:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(PATIENCE_S)

        with patched({(HERE, "halfway"): halt}):
            for side.step in range(HALTS[0] + 2):
                loss = t.loss()
                if threads[0].ident is not None:
                    whole = {name: fingerprint(read().detach()) for name, read in reads.items()}
                    break
                t.optimizer.zero_grad()
                t.backward(loss)
                t.optimizer.step()
                mean.update_parameters(t.net)
        for thread in threads:
            thread.join(DEADLINE_S)
        side.close()
    return {name: (seen.get(name), whole.get(name)) for name in reads}


def forks_beside_an_update() -> str:
    """Return what a fork finds of an update that another thread was making."""
    pending.keep_updates_whole_in_forks()
    value, held = ["half"], threading.Event()

    def update() -> None:
        with pending.UPDATES:
            held.set()
            threading.Event().wait(PATIENCE_S)
            value[0] = "whole"

    thread = threading.Thread(target=update)
    thread.start()
    held.wait()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        found = value[0] if pending.UPDATES.acquire(timeout=DEADLINE_S) else "locked"
        os.write(writing, found.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = file.read()
    os.waitpid(child, 0)
    thread.join()
    return found
