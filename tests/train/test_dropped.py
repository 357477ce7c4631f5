"""A wrapped model that is dropped is freed, in whatever stage training is."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from syncline.plan.plan import Plan
from syncline.plan.recipe import Recipe
from syncline.train.ddp import DistributedDataParallel, planned_training
from syncline.train.measure.step_hooks import after_steps, before_steps
from syncline.train.overlap.pending import UPDATES
from tests.timeouts import DEADLINE_S, POLL_S
from tests.train.overlap.overlap_plans import Style, plan_of
from tests.workers import WorkerPool

WIDTH = 16
MOST_STEPS = 200


def planned_net() -> tuple[nn.Sequential, Plan]:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    return net, plan_of(net, [name for name, _ in net.named_parameters()][::-1], 2, Style())


def steps(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Train; yield the phase after each step."""
    for step in range(MOST_STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        ddp(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        yield ddp.phase
    raise AssertionError(f"still in {ddp.phase} after {MOST_STEPS} steps")


def methods_on_steps() -> int:
    return len(before_steps.alive()) + len(after_steps.alive())


def left_of(kind: str, keeps_model: bool) -> dict[str, Any]:
    """Return what is left of a wrapper that is dropped in the second step of a phase.

    Args:
        kind: the phase's name begins with it; or what the wrapper was asked for.
        keeps_model: whether the program goes on with the model, without a wrapper.
    """
    gc.collect()  # what earlier jobs have left
    before = methods_on_steps()
    net, plan = planned_net()
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
        "runner": weakref.ref(planned_training(ddp).runner),
        "optimizer": weakref.ref(optimizer),
        "model": weakref.ref(net),
        "parameter": weakref.ref(net[0].weight),
    }
    reached = (found for found in steps(ddp, optimizer) if found.startswith(phase))
    for _ in itertools.islice(reached, 3):
        pass
    if kind == "residuals":
        planned_training(ddp).wrapped.compressing.deliver_residuals()
        assert any(p._backward_hooks for p in net.parameters())
    del ddp, optimizer, reached
    kept = net if keeps_model else nn.Module()
    del net
    gc.collect()  # frees the wrapper,
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
    hooks = [h for m in kept.modules() for h in (m._forward_pre_hooks, m._forward_hooks)]
    hooks += [p._backward_hooks for p in kept.parameters() if p._backward_hooks is not None]
    on_steps = methods_on_steps() - before
    return {"kept": sorted(alive), "hooks": sum(map(len, hooks)), "on steps": on_steps}


@pytest.mark.parametrize(
    ("kind", "keeps_model"),
    [
        *(("profiling", False), ("overlap_optimizers", False), ("measuring DDP", False)),
        *(("trying", False), ("recording", False), ("steady", False), ("residuals", False)),
        *(("profiling", True), ("recording", True), ("steady", True), ("residuals", True)),
    ],
)
def test_nothing_else_is_left_of_a_model_that_is_dropped(
    workers: WorkerPool, kind: str, keeps_model: bool
) -> None:
    kept = ["model", "parameter"] if keeps_model else []
    expected = {"kept": kept, "hooks": 0, "on steps": 0}
    assert workers.run(left_of, 2, kind, keeps_model) == [expected] * 2


def dropped_during_an_update() -> bool:
    """Say whether a wrapper with pending gradients can go while another thread makes updates."""
    net, plan = planned_net()
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
        parameter.grad.sum()
    return in_time == [True]


def test_garbage_collection_waits_for_no_lock(workers: WorkerPool) -> None:
    """It may run on a thread that another one waits for under that lock."""
    assert workers.run(dropped_during_an_update, 2) == [True, True]
