"""Training loops that make other forward passes on every rank, as DDP allows."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from syncline.train.ddp import DistributedDataParallel, planned_training
from tests.train.overlap.overlap_models import Net, loss_of

Loop = Callable[[Any, torch.optim.Optimizer, int], None]


def _train(ddp: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(ddp, step).backward()
    optimizer.step()


def _sample(ddp: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Rank 0 logs a sample before the others may go on."""
    if dist.get_rank() == 0:
        loss_of(ddp, step, 1).item()
    dist.barrier()
    _train(ddp, optimizer, step)


def _sample_after(ddp: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Another rank does so at the end of some steps, between gradients and update at others."""
    optimizer.zero_grad()
    loss_of(ddp, step).backward()
    if dist.get_rank() == step % 3:
        loss_of(ddp, step, 1).item()
    dist.barrier()
    optimizer.step()
    if dist.get_rank() == step % 2:
        loss_of(ddp, step, 2).item()
    dist.barrier()


def _fails(ddp: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A forward pass fails on one rank, as without memory, and all ranks skip the batch."""
    if step % 5 == 4:
        try:
            inputs = torch.ones(4, 3 if dist.get_rank() == 0 else 12)
            ddp(inputs)
        except RuntimeError:
            pass
        dist.barrier()
    _train(ddp, optimizer, step)


def _accumulates(ddp: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Ranks accumulate other numbers of batches."""
    optimizer.zero_grad()
    with ddp.no_sync():
        for micro in range(1 + dist.get_rank()):
            loss_of(ddp, step, 1 + micro).backward()
    loss_of(ddp, step).backward()
    optimizer.step()


def _switches(ddp: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Accumulation is switched on and off, also by hand."""
    optimizer.zero_grad()
    before = (0, 2, 1)[step // 5 % 3]
    for micro in range(before):
        ddp.require_backward_grad_sync = False
        loss_of(ddp, step, 1 + micro).backward()
    ddp.require_backward_grad_sync = True
    loss_of(ddp, step).backward()
    optimizer.step()


def _twice(ddp: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Two forward passes for one backward pass, then another of both."""
    optimizer.zero_grad()
    (loss_of(ddp, step, 0) + loss_of(ddp, step, 1)).backward()
    loss_of(ddp, step, 2).backward()
    optimizer.step()


def _evaluates(ddp: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One rank evaluates, with and without gradients, in training and evaluation mode."""
    if dist.get_rank() == 0 and step % 4 == 3:
        loss_of(ddp.eval(), step, 1).item()
        with torch.no_grad():
            loss_of(ddp, step, 1).item()
            loss_of(ddp.train(), step, 1).item()
    dist.barrier()
    _train(ddp, optimizer, step)


LOOPS: dict[str, Loop] = {
    "a sample": _sample,
    "samples after": _sample_after,
    "a failure": _fails,
    "twice": _twice,
    "evaluation": _evaluates,
    "accumulation": _accumulates,
    "accumulation now and then": _switches,
}


def beside_stock(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train twins through all stages; say where they differ, and what came of the measurement."""
    loop = LOOPS[kind]
    net = Net()
    twin = copy.deepcopy(net)
    ours = DistributedDataParallel(net, check=False, **arguments)
    stock = TorchDDP(twin, static_graph=arguments.get("static_graph", False))
    optimizers = [torch.optim.AdamW(ddp.parameters(), lr=1e-2) for ddp in (ours, stock)]
    ours.overlap(optimizers[0])
    # torch's class makes its final buckets, together, in the second forward pass, or the third.
    alike = 2 + stock.static_graph
    for step in itertools.count():
        for ddp, optimizer in zip((ours, stock), optimizers, strict=True):
            (_train if step < alike else loop)(ddp, optimizer, step)
        if not ours.measuring and step % 10 == 9:
            break
        assert step < 300, ours.phase
    pairs = zip(net.state_dict().items(), twin.state_dict().values(), strict=True)
    run = ours.run_record()
    return {
        "differences": [name for (name, mine), other in pairs if not torch.equal(mine, other)],
        "decision": run.decision,
        "iterations": planned_training(ours).tuning.iteration,
        "steps": step + 1,
        "alike": alike,
        "timeline": planned_training(ours).tuning.measured_timeline is not None,
    }


def all_inside(static: bool) -> dict[str, Any]:
    """Train where gradients come in backward passes inside the one that is asked for."""

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not static:
                return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
            hidden = self.enter(x)
            for _ in range(2):
                hidden = checkpoint(self.hidden, hidden, use_reentrant=True)
            return self.leave(self.norm(hidden))

    nets: list[nn.Module] = [Checkpointed()]
    nets.append(copy.deepcopy(nets[0]))
    ours = DistributedDataParallel(nets[0], check=False, planner="merge")
    stock = TorchDDP(nets[1])
    if static:
        ours._set_static_graph()
        stock._set_static_graph()
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1) for ddp in (ours, stock)]
    step = 0
    while ours.measuring or step % 10:
        for ddp, optimizer in zip((ours, stock), optimizers, strict=True):
            _train(ddp, optimizer, step)
        step += 1
        assert step < 300, ours.phase
    pairs = zip(nets[0].state_dict().items(), nets[1].state_dict().values(), strict=True)
    return {
        "differences": [name for (name, mine), other in pairs if not torch.equal(mine, other)],
        "iterations": planned_training(ours).tuning.iteration - step,
    }
