"""Ranks that make different forward passes train as under DDP, and nobody waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from syncline.train.ddp import planned_training
from tests.cases import first_few
from tests.train.jobs import OPTIMIZERS, Twins, differing
from tests.train.overlap.overlap_models import Net, loss_of
from tests.workers import WorkerPool

Loop = Callable[[Any, Optimizer, int], None]


def train_step(ddp: Any, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(ddp, step).backward()
    optimizer.step()


def sample(ddp: Any, optimizer: Optimizer, step: int) -> None:
    """Rank 0 logs a sample before the others may go on."""
    if dist.get_rank() == 0:
        loss_of(ddp, step, 1).item()
    dist.barrier()
    train_step(ddp, optimizer, step)


def sample_after(ddp: Any, optimizer: Optimizer, step: int) -> None:
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


def fails(ddp: Any, optimizer: Optimizer, step: int) -> None:
    """A forward pass fails on one rank, as without memory, and all ranks skip the batch."""
    if step % 5 == 4:
        with contextlib.suppress(RuntimeError):
            ddp(torch.ones(4, 3 if dist.get_rank() == 0 else 12))
        dist.barrier()
    train_step(ddp, optimizer, step)


def accumulates(ddp: Any, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    with ddp.no_sync():
        for micro in range(1 + dist.get_rank()):
            loss_of(ddp, step, 1 + micro).backward()
    loss_of(ddp, step).backward()
    optimizer.step()


def switches(ddp: Any, optimizer: Optimizer, step: int) -> None:
    """Accumulation is switched on and off, also by hand."""
    optimizer.zero_grad()
    for micro in range((0, 2, 1)[step // 5 % 3]):
        ddp.require_backward_grad_sync = False
        loss_of(ddp, step, 1 + micro).backward()
    ddp.require_backward_grad_sync = True
    loss_of(ddp, step).backward()
    optimizer.step()


def twice(ddp: Any, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    (loss_of(ddp, step, 0) + loss_of(ddp, step, 1)).backward()
    loss_of(ddp, step, 2).backward()
    optimizer.step()


def evaluates(ddp: Any, optimizer: Optimizer, step: int) -> None:
    """One rank evaluates, with and without gradients, in training and evaluation mode."""
    if dist.get_rank() == 0 and step % 4 == 3:
        loss_of(ddp.eval(), step, 1).item()
        with torch.no_grad():
            loss_of(ddp, step, 1).item()
            loss_of(ddp.train(), step, 1).item()
    dist.barrier()
    train_step(ddp, optimizer, step)


LOOPS = [sample, sample_after, fails, twice, evaluates, accumulates, switches]


def until_steady(twins: Twins, loop: Loop, alike: int = 0) -> int:
    """Train until ours has been steady for some steps, at first as usual; return all steps."""
    step = 0
    while twins.ours.measuring or step % 10:
        for pair in twins.pairs:
            (train_step if step < alike else loop)(*pair, step)
        step += 1
        assert step < 300, twins.ours.phase
    return step


def beside_ddp(loop: Loop, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train twins through all stages; say where they differ, and what came of the measurement."""
    twins = Twins(Net(), OPTIMIZERS["adamw"], overlaps=True, check=False, **arguments)
    # torch's class makes its final buckets, together, in the second forward pass, or the third.
    alike = 2 + arguments.get("static_graph", False)
    steps = until_steady(twins, loop, alike)
    tuning = planned_training(twins.ours).tuning
    return {
        "differences": differing(*twins.pairs),
        "decision": twins.ours.run_record().decision,
        "more iterations": tuning.iteration - steps - (steps - alike) * (loop is twice),
        "has timeline": tuning.measured_timeline is not None,
    }


def cases(static: bool) -> list[tuple[bool, Loop, str]]:
    return [(static, loop, ("overlap", "wfbp")[(n + static) % 2]) for n, loop in enumerate(LOOPS)]


@pytest.mark.parametrize(
    ("static", "loop", "planner"), [*first_few(cases(False)), *first_few(cases(True))]
)
def test_only_exchanged_backward_passes_count(
    workers: WorkerPool, static: bool, loop: Loop, planner: str
) -> None:
    views = static and planner == "wfbp"
    arguments = {"static_graph": static, "planner": planner, "gradient_as_bucket_view": views}
    expected = {"decision": "planned", "differences": [], "more iterations": 0}
    for result in workers.run(beside_ddp, 2, loop, arguments):
        assert result == {**expected, "has timeline": True}


def all_inside(static: bool) -> tuple[list[str], int]:
    """Train where gradients come in backward passes inside the one that is asked for.

    Return what differs from DDP, and how many iterations there were beside the steps.
    """

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not static:
                return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
            hidden = self.enter(x)
            for _ in range(2):
                hidden = checkpoint(self.hidden, hidden, use_reentrant=True)
            return self.leave(self.norm(hidden))

    twins = Twins(Checkpointed(), check=False, planner="merge")
    if static:
        for ddp, _ in twins.pairs:
            ddp._set_static_graph()
    steps = until_steady(twins, train_step)
    return differing(*twins.pairs), planned_training(twins.ours).tuning.iteration - steps


@pytest.mark.parametrize("static", [False, True])
def test_backward_passes_inside_others_count_once(workers: WorkerPool, static: bool) -> None:
    assert workers.run(all_inside, 2, static) == [([], 0)] * 2
