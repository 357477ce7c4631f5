"""What is left in memory once nothing refers to a wrapped model any more."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from syncline.plan.recipe import Recipe
from syncline.train.ddp import DistributedDataParallel
from syncline.train.measure.step_hooks import after_steps, before_steps
from syncline.train.overlap.pending import UPDATES
from tests.mortal import POLL_S
from tests.timeouts import DEADLINE_S
from tests.train.overlap.overlap_plans import Style, plan_of

WIDTH = 16
MOST_STEPS = 200


def steps(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Train; yield the phase after each step."""
    for step in range(MOST_STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        ddp(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        yield ddp.phase
    raise AssertionError(f"still in {ddp.phase} after {MOST_STEPS} steps")


def dropped(kind: str) -> dict[str, Any]:
    """Return what is left once nothing is used any more."""
    return _left_of(kind, keeps_model=False)


def dropped_but_kept(kind: str) -> dict[str, Any]:
    """Return what is left beside the model itself."""
    return _left_of(kind, keeps_model=True)


def dropped_during_an_update() -> bool:
    """Say whether a wrapper with pending gradients can go while another thread makes updates."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    plan = plan_of(net, [name for name, _ in net.named_parameters()][::-1], 2, Style())
    ddp = DistributedDataParallel(net, plan=plan, check=False)
    optimizer = ddp.overlap(torch.optim.SGD(net.parameters(), lr=0.01))
    next(found for found in steps(ddp, optimizer) if found == "steady")
    ddp(torch.ones(4, WIDTH)).sum().backward()
    begun, collected = threading.Event(), threading.Event()
    in_time = []

    def update() -> None:
        with UPDATES:
            begun.set()
            in_time.append(collected.wait(DEADLINE_S))

    thread = threading.Thread(target=update)
    thread.start()
    begun.wait(DEADLINE_S)
    del ddp, optimizer
    gc.collect()
    collected.set()
    thread.join(DEADLINE_S)
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.sum()
    return in_time == [True]


def _left_of(kind: str, *, keeps_model: bool) -> dict[str, Any]:
    """Return what is left of a wrapper that is dropped in the second step of a phase.

    Args:
        kind: the phase's name begins with it; or what the wrapper was asked for.
        keeps_model: whether the program goes on with the model, without a wrapper.
    """
    gc.collect()  # what earlier jobs have left
    before = _on_steps()
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    plan = plan_of(net, [name for name, _ in net.named_parameters()][::-1], 2, Style())
    options: dict[str, Any] = {"plan": plan, "check": kind in ("measuring DDP", "trying")}
    phase = kind
    if kind in ("profiling", "overlap_optimizers"):
        phase, options = "profiling", {"overlap_optimizers": kind == "overlap_optimizers"}
    elif kind == "residuals":
        phase, options = "steady", {"compression": Recipe(density=0.1), "check": False}
    ddp = DistributedDataParallel(net, **options)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if kind not in ("overlap_optimizers", "residuals"):
        optimizer = ddp.overlap(optimizer)
    watched = {
        "wrapper": weakref.ref(ddp),
        "runner": weakref.ref(ddp._training.runner),
        "optimizer": weakref.ref(optimizer),
        "model": weakref.ref(net),
        "parameter": weakref.ref(net[0].weight),
    }
    reached = (found for found in steps(ddp, optimizer) if found.startswith(phase))
    for _ in itertools.islice(reached, 3):
        pass
    if kind == "residuals":
        assert ddp._training.wrapped.compressing is not None
        ddp._training.wrapped.compressing.deliver_residuals()
        assert any(p._backward_hooks for p in net.parameters())
    del ddp, optimizer, reached
    kept = net if keeps_model else None
    del net
    gc.collect()  # frees the wrapper,
    if kept is not None:
        for parameter in kept.parameters():
            parameter.sum()  # its last update refers to the optimizer until it is made
        del parameter
    goes = {"wrapper", "runner", "optimizer", *(() if keeps_model else ("model", "parameter"))}
    deadline = time.monotonic() + DEADLINE_S
    alive = goes
    while goes & alive and time.monotonic() < deadline:  # threads finish the exchange first
        gc.collect()
        alive = {name for name, reference in watched.items() if reference() is not None}
        time.sleep(POLL_S)
    found: dict[str, Any] = {"kept": sorted(alive)}
    if kept is not None:
        hooks = [h for m in kept.modules() for h in (m._forward_pre_hooks, m._forward_hooks)]
        hooks += [p._backward_hooks for p in kept.parameters() if p._backward_hooks is not None]
        found["hooks"] = sum(map(len, hooks))
    found["on steps"] = _on_steps() - before
    return found


def _on_steps() -> int:
    return len(before_steps._alive()) + len(after_steps._alive())
