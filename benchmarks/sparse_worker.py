"""What runs on the hosts of ``sparse_speed``: ``python -m benchmarks.sparse_worker JOB``.

``JOB`` is a JSON file: a model of the gTop-k paper, and turns of contestants to take one after the
other. Rank 0 prints a line of JSON behind a mark for every turn, so that nothing is lost when a
later one fails.

Computation is emulated by waiting for a device that takes the paper's time. Its gradients lie in
DDP's buckets already, as a device's own memory would have them: this machine's few cores stand for
all hosts, and would else spend more time on making gradients than on exchanging them. The first of
them are normally distributed and different on every rank; from then on a bucket brings back what
the last exchange has left in it, and selection lives on the residuals.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function

from benchmarks.sparse_models import DENSITY, PAPER, Published
from syncline.hooks import GTopKState, Recipe, gtopk
from syncline.train.measure.exchange import gather_numbers
from syncline.train.measure.statistics import median
from syncline.train.sparse.algorithms import ALGORITHMS, Share
from syncline.train.sparse.sparse_transport import SparseTransport
from syncline.train.sparse.vector import Quota, SparseVector
from syncline.train.sparse.wire import WireFormat

__all__ = ["DENSE", "MARK"]

MARK = "sparse_speed: "
DENSE = "dense"
UNTIMED = 3
"""DDP forms its buckets anew after the first iteration; random gradients fill those of the second.
The third is the first that is like all others."""
TIMEOUT = timedelta(seconds=120)
BASE_ELEMENTS = 1 << 22
"""Random numbers of a rank, which larger gradients repeat."""
STEP, SHIFT = 977, 8192
CPU = torch.device("cpu")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    published = PAPER[job["model"]]
    until_s = time.monotonic() + job["seconds"]
    for kind, name, number in job["turns"]:
        # As soon as one rank finds that the time is up, all stop: none begins a turn alone.
        if everyone([float(time.monotonic() > until_s)])[0]:
            break
        measure = training if kind == "training" else exchanging
        say(kind=kind, contestant=name, round=number, **measure(published, name, job))
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def say(**what: Any) -> None:
    if dist.get_rank() == 0:
        print(MARK + json.dumps(what), flush=True)


def everyone(own: list[float]) -> list[float]:
    """Return the largest of all ranks' numbers, one by one."""
    group = dist.group.WORLD
    assert group is not None
    return [max(each) for each in zip(*gather_numbers(own, group, CPU), strict=True)]


# --- training ---


class Device:
    """Says when what it was given to do is done."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def run(self, seconds: float) -> None:
        """Run something after what was begun before, and wait for it."""
        self._free_s = max(self._free_s, time.perf_counter()) + seconds
        while (left_s := self._free_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class Ready(Function):
    """Backward: takes its time, then hands out a gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, model: Emulated, index: int, parameter: Tensor) -> Tensor:
        del parameter
        ctx.model, ctx.index = model, index
        return token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor]:
        return gradient, None, None, ctx.model.gradient(ctx.index)


class Emulated(nn.Module):
    """A model of the paper whose computation is waiting."""

    def __init__(self, published: Published, rank: int) -> None:
        super().__init__()
        profile = published.profile()
        self._device = Device()
        self._forward_s = sum(o.duration_s for o in profile.operations if o.phase == "forward")
        shapes = published.model.shapes()
        self._ready_s = []
        last = None
        weights = []
        for gradient in profile.gradients:  # in ready order
            first = gradient.ready_after != last
            last = gradient.ready_after
            took_s = profile.operations[gradient.ready_after].duration_s if first else 0.0
            self._ready_s.append(took_s)
            # Zeros that nobody writes to take no memory.
            weights.append(nn.Parameter(torch.zeros(shapes[gradient.name])))
        # DDP takes parameters to be in the order of the forward pass.
        self.weights = nn.ParameterList(reversed(weights))
        base = np.random.default_rng(rank).standard_normal(BASE_ELEMENTS, np.float32)
        self._base = torch.from_numpy(base)
        self._views: dict[int, Tensor] = {}

    def forward(self) -> Tensor:
        self._device.run(self._forward_s)
        token = torch.zeros((), requires_grad=True)
        for index in reversed(range(len(self.weights))):
            token = Ready.apply(token, self, index, self._weight(index))  # type: ignore[no-untyped-call]
        return token

    def _weight(self, index: int) -> nn.Parameter:
        weight = self.weights[len(self.weights) - 1 - index]
        assert isinstance(weight, nn.Parameter)
        return weight

    def gradient(self, index: int) -> Tensor:
        """Take the time of a gradient and return it."""
        self._device.run(self._ready_s[index])
        if index in self._views:
            return self._views[index].detach()
        return torch.zeros_like(self._weight(index))  # not touched yet, so without memory

    def keep_buckets(self) -> None:
        """From now on gradients lie where they are; random ones do, to begin with."""
        for index in range(len(self.weights)):
            grad = self._weight(index).grad
            assert grad is not None
            flat = grad.view(-1)
            for start in range(0, len(flat), BASE_ELEMENTS - SHIFT):
                stop = min(len(flat), start + BASE_ELEMENTS - SHIFT)
                # From another place each time, so that no period meets that of the rows.
                first = (start // (BASE_ELEMENTS - SHIFT) * STEP + index) % SHIFT
                flat[start:stop] = self._base[first : first + stop - start]
            self._views[index] = grad


class Clock:
    """Adds up how long a function takes, and what it returns if that is one to call later."""

    def __init__(self, owner: Any, name: str) -> None:
        self.spent_s = 0.0
        self._call = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = self._timed(self._call, *arguments, **named)
        return partial(self._timed, result) if callable(result) else result

    def _timed(self, call: Any, *arguments: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            self.spent_s += time.perf_counter() - began_s


def training(published: Published, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of iterations, and how long the exchange's thread did what."""
    module = Emulated(published, dist.get_rank())
    model = nn.parallel.DistributedDataParallel(
        module, init_sync=False, gradient_as_bucket_view=True
    )
    reducing = communicating = None
    if name != DENSE:
        state = GTopKState(model, Recipe(density=DENSITY, algorithm=name))
        session = state._session
        reducing = Clock(session, "prepare")
        communicating = Clock(session.transport, "run")
        model.register_comm_hook(state, gtopk)
    steps_s, spent = [], []
    for number in range(UNTIMED + job["iterations"]):
        dist.barrier()
        before = [c.spent_s if c else 0.0 for c in (reducing, communicating)]
        began_s = time.perf_counter()
        model.zero_grad()
        model().backward()
        took_s = time.perf_counter() - began_s
        after = [c.spent_s if c else 0.0 for c in (reducing, communicating)]
        if number == 1:
            module.keep_buckets()
        if number >= UNTIMED:
            steps_s.append(took_s)
            spent.append([b - a for a, b in zip(before, after, strict=True)])
    slowest_s = everyone(steps_s)
    group = dist.group.WORLD
    assert group is not None
    own = [median([row[0] - row[1] for row in spent]), median([row[1] for row in spent])]
    split = list(zip(*gather_numbers(own, group, CPU), strict=True))
    # The reducer holds the hook's state, which the collector cannot see: a circle for ever. And the
    # state's thread holds the state.
    del model.reducer, model.logger
    if name != DENSE:
        session.residuals._residuals.clear()
    return {
        "iterations_s": slowest_s,
        "compress_s": median(split[0]),
        "communicate_s": median(split[1]),
    }


# --- the exchange alone ---


def exchanging(published: Published, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of exchanges of k entries of every tensor, all in one message."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    recipe = Recipe(density=DENSITY, algorithm=name)
    lengths = tuple(g.elements for g in published.profile().gradients)
    quota = Quota(lengths, tuple(recipe.count_at(0, n) for n in lengths))
    random = np.random.default_rng(rank)
    places = [
        np.sort(random.choice(n, k, replace=False)) + first
        for n, k, first in zip(lengths, quota.counts, np.cumsum([0, *lengths[:-1]]), strict=True)
    ]
    indices = np.concatenate(places).astype(np.uint32)
    own = SparseVector(quota.length, indices, random.standard_normal(quota.k, np.float32))
    wire = WireFormat(k=quota.k, length=quota.length, precision="float32", digest=1)
    group = dist.group.WORLD
    assert group is not None
    transport = SparseTransport(group, TIMEOUT)
    times_s = []
    for number in range(1 + job["repetitions"]):
        dist.barrier()
        began_s = time.perf_counter()
        transport.run(ALGORITHMS[name], Share(rank, ranks, own, quota, wire.precision), wire)
        if number:  # the first warms up
            times_s.append(time.perf_counter() - began_s)
    return {"exchanges_s": everyone(times_s), "entries": quota.k, "bytes": wire.message_bytes}


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # at once: Gloo's threads would hold up the interpreter
