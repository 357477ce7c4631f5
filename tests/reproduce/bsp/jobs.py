"""What the ranks of the tests do, and their model, with what makes layers hard to find."""

from __future__ import annotations

import contextlib
import gc
import os
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from reproduce.bsp import BspSgd, channel, wrapper
from syncline.comm.devices import DeviceGroup
from syncline.comm.groups import Group
from syncline.comm.groups.group import Pending
from syncline.errors import SynclineError, UserError
from syncline.plan.planners import planner_named
from syncline.plan.planners.merge import Merge
from tests.comm.devices.host_device import HostDevice
from tests.comm.devices.jobs import joined as joined_devices
from tests.comm.groups.mortal_jobs import initialize
from tests.mortal import Place
from tests.timeouts import DEADLINE_S

WIDTH = 6


class Odd(nn.Module):
    """Tied, frozen and unused weights, one read by its owner's parent, a branch of some ranks.

    Args:
        seed: of the weights.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.read_by_parent = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

    def forward(self, inputs: Tensor, branch: bool) -> Tensor:
        hidden = self.norm(self.first(inputs)).tanh()
        hidden = functional.linear(hidden, self.read_by_parent.weight, self.read_by_parent.bias)
        if branch:
            hidden = hidden + self.sometimes(hidden)
        hidden = self.frozen(self.second(hidden).tanh()) * self.scale
        hidden = checkpoint(self.tied, hidden, use_reentrant=False)
        out: Tensor = self.head(hidden)
        return out


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return what a rank trains on: other numbers on each, and a branch on the last rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, step % 3 == 1 and rank == 1


STEPS = 18  # more than the planned form of algorithm 2 observes

CELLS: tuple[tuple[int, str | None, str | None], ...] = (
    (1, "linear-pipeline", None),
    (1, "minimum-spanning-tree", None),
    (1, None, None),
    (2, "linear-pipeline", None),
    (2, "bidirectional-exchange", "wfbp"),
    (2, "minimum-spanning-tree", "merge"),
    (3, "linear-pipeline", None),
    (3, "bidirectional-exchange", None),
    (3, None, None),
)  # algorithm, collectives and planner

Optimizers = dict[str, Callable[[nn.Module], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=False),
}


@contextlib.contextmanager
def joined(timeout_s: float = 60.0) -> Iterator[Group]:
    """Join all ranks of torch's process group in a group of ours."""
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    store = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = Group(store, rank, ranks, name=name[0], timeout_s=timeout_s)
    try:
        yield group
        dist.barrier()
    finally:
        group.close()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, dtype: torch.dtype, accumulate: int
) -> None:
    """Train a wrapped model, as any script would."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            last = part == accumulate - 1
            with nullcontext() if last else model.no_sync():  # type: ignore[operator]
                output = model(*batch(STEPS * part + step, dist.get_rank(), dtype))
                output.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def trained(
    ranks: Group | DeviceGroup,
    optimizer_name: str = "momentum",
    dtype: torch.dtype = torch.float32,
    accumulate: int = 1,
    **options: Any,
) -> tuple[BspSgd, torch.optim.Optimizer]:
    """Train from other weights on each rank: the root's are the model's."""
    module = Odd(dist.get_rank()).to(dtype)
    optimizer = OPTIMIZERS[optimizer_name](module)
    model = BspSgd(module, optimizer, ranks, **options)
    train(model, optimizer, dtype=dtype, accumulate=accumulate)
    model.synchronize()
    return model, optimizer


def state(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights, and the root's buffers, which are the model's."""
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
    return {name: value.clone() for name, value in module.state_dict().items()}


def every_cell(optimizer_name: str, dtype: torch.dtype, accumulate: int) -> dict[str, Any]:
    """Train under every cell and under DDP; return the final states, and facts on the cells."""
    module = Odd(0).to(dtype)
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    train(ddp, OPTIMIZERS[optimizer_name](module), dtype=dtype, accumulate=accumulate)
    found: dict[str, Any] = {"ddp": state(module)}
    for algorithm, collectives, planned in CELLS:
        options: dict[str, Any] = {"algorithm": algorithm, "collectives": collectives}
        options["planner"] = planner_named(planned) if planned else None
        with joined() as group:
            model, optimizer = trained(group, optimizer_name, dtype, accumulate, **options)
            found[f"{algorithm} {collectives} {planned}"] = {
                "state": state(model.module),
                "messages": model.messages,
                "optimizer states": len(optimizer.state),
                "gradients": sum(p.grad is not None for p in model.parameters()),
                "profiled": model.iteration_profile is not None,
            }
    return found


def between_devices(folder: str) -> dict[str, bool]:
    """Train under each algorithm over a device group and over a native one; compare the weights."""
    same = {}
    for algorithm in (1, 2, 3):
        options = {"algorithm": algorithm, "collectives": "linear-pipeline"}
        with joined() as group:
            expected = state(trained(group, **options)[0].module)
        name, device = str(algorithm), HostDevice(folder)
        with joined_devices(folder, name, device, block_bytes=256) as devices:
            found = state(trained(devices, **options)[0].module)
        same |= {f"{algorithm} {n}": torch.equal(v, expected[n]) for n, v in found.items()}
    return same


def small(
    group: Group, lr: float = 0.1, **options: Any
) -> tuple[nn.Module, BspSgd, Callable[[], None]]:
    """Return a module of two layers, its wrapper, and a call that trains a step."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    model = BspSgd(module, optimizer, group, **options)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    return module, model, step


def weights_apart(every: int) -> list[bool]:
    """Disturb the other ranks' weights; say after each update whether they are the root's."""
    with joined() as group:
        module, _, step = small(group, lr=0.0, algorithm=3, synchronise_every=every)
        weight = module[0].weight
        with torch.no_grad():
            weight += dist.get_rank()
        same = []
        for _ in range(2 * every):
            step()
            roots = weight.detach().clone()
            dist.broadcast(roots, src=0)
            same.append(bool(torch.equal(roots, weight)))
        return same


def layers() -> list[list[str]]:
    """Return the names of the parameters of each of algorithm 1's layers."""
    with joined() as group:
        module = Odd(0)
        model = BspSgd(module, torch.optim.SGD(module.parameters(), lr=0.1), group)
        model(*batch(0, 0, torch.float32))
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        members = model._algorithm._members  # type: ignore[attr-defined]
        return [sorted(names[index] for index in layer) for layer in members]


def clocked(algorithm: int) -> tuple[float, float, float]:
    """Train by a clock that moves 20 ms in each forward pass, 1 ms in each wait, and else not.

    Returns:
        The profile's seconds of communication and of computation, and the median of the waits of
        an iteration.
    """
    clock = SimpleNamespace(now_s=0.0)
    clock.perf_counter = lambda: clock.now_s
    waits, wait = [0], Pending.wait

    def waited(self: Pending, timeout_s: float | None = None) -> None:
        clock.now_s += 0.001
        waits[-1] += 1
        wait(self, timeout_s)

    def computed(*_: Any) -> None:
        clock.now_s += 0.02

    with joined() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "wait", waited)
        for module in (channel, wrapper):
            patch.setattr(module, "time", clock)
        _, model, step = small(group, algorithm=algorithm)
        model.register_forward_hook(computed)
        for _ in range(8):
            waits.append(0)
            step()
        profile = model.iteration_profile
        assert profile is not None
        measured = waits[1 + wrapper.WARM_UP_ITERATIONS :]
        return profile.communication_s, profile.computation_s, median(measured)


def dropped() -> list[bool]:
    """Train under each algorithm, drop all; say whether the weights are gone at once."""
    gone = []
    gc.disable()
    with joined() as group:
        for algorithm in (1, 2, 3):
            module, model, step = small(group, algorithm=algorithm)
            step()
            weight = weakref.ref(module[0].weight)
            del model, step
            module(torch.ones(1, 3)).sum().backward()  # as before it was wrapped
            del module
            gone.append(weight() is None)
    gc.enable()
    return gone


def refuses(words: str, make: Callable[[Group], object]) -> None:
    with joined() as group, pytest.raises(UserError, match=words):
        make(group)


def wrong_arguments() -> None:
    """Give arguments that cannot be used."""
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    good = torch.optim.SGD(module.parameters(), lr=0.1)
    foreign = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=0.1)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    there = nn.Linear(2, 2, device="meta")
    theirs = torch.optim.SGD(there.parameters(), lr=0.1)
    wrong: dict[str, dict[str, Any]] = {
        "algorithms 1, 2 and 3, found 4": {"algorithm": 4},
        "unknown .* 'linear-pipelin'; .*'linear-pipeline'": {"collectives": "linear-pipelin"},
        "algorithm 1 has no messages to plan; leave the planner 'merge'": {"planner": Merge()},
        "must be at least 1, found 0": {"algorithm": 3, "synchronise_every": 0},
    }
    for words, arguments in wrong.items():
        refuses(words, partial(BspSgd, module, good, **arguments))
    refuses("holds 2 parameters that this model", partial(BspSgd, module, foreign))
    refuses("no parameter of this model", partial(BspSgd, frozen, good))
    refuses("'weight' is on meta, .* on cpu", partial(BspSgd, there, theirs))


def wrong_use() -> None:
    """Train, on one rank alone, by loops that cannot be right."""

    def refuses_loop(
        words: str, loop: Callable[[BspSgd, torch.optim.Optimizer], None], module: nn.Module
    ) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        refuses(words, lambda group: loop(BspSgd(module, optimizer, group, algorithm=2), optimizer))

    def twice(model: BspSgd, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    refuses_loop("a second backward pass .* gradient of 'weight'", twice, nn.Linear(2, 2))
    closed = r"step\(\) was given a closure"
    refuses_loop(closed, lambda _, optimizer: optimizer.step(lambda: 0.0), nn.Linear(2, 2))
    sparse, one = nn.Embedding(3, 2, sparse=True), torch.tensor([1])
    refuses_loop("'weight' is torch.sparse_coo", lambda m, _: m(one).sum().backward(), sparse)


def dies(place: Place, algorithm: int, when: str) -> None:
    """Train until rank 1 ends, in the third iteration; the others print what they are told."""
    initialize(place, transport=None)
    with joined(DEADLINE_S) as group:
        _, model, step = small(group, algorithm=algorithm)
        before, after = model.register_forward_pre_hook, model.register_forward_hook
        try:
            for number in range(5):
                if place.rank == 1 and number == 2:
                    (before if when == "forward" else after)(lambda *_: os._exit(3))
                step()
        except SynclineError as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)  # gloo waits for who is gone
