"""Twins in one process do not disturb each other's random numbers, nor each other's time."""

from __future__ import annotations

from typing import Any

import torch

from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.group import Worker
from syncline.lab.training.replica import Replica, sgd
from syncline.lab.training.task import task_of
from syncline.plan.plan import Message, Plan, Tensor
from syncline.train.ddp import DistributedDataParallel
from tests.workers import WorkerPool

CPU = torch.device("cpu")


def losses_with_and_without_a_twin() -> list[list[float]]:
    config = TrainingConfig.of(
        "transformer", "text", workers=1, overrides={"batch_size": 2}, planner="ddp"
    )
    task = task_of(config)
    worker = Worker(rank=0, workers=1, device=CPU)
    steps = [batches for batches, _ in zip(task.steps(0, worker), range(4), strict=False)]

    def replica() -> Replica:
        torch.manual_seed(3)
        ddp = torch.nn.parallel.DistributedDataParallel(task.build())
        optimizer = sgd(ddp.module, config)
        return Replica(
            name="x", ddp=ddp, optimizer=optimizer, task=task, config=config, worker=worker
        )

    alone = replica()
    losses = [alone.run_block(steps, beside_another=False)]
    both = replica(), replica()
    in_turns: tuple[list[float], list[float]] = ([], [])
    for block in (steps[:1], steps[1:3], steps[3:]):
        for each, results in zip(both, in_turns, strict=True):
            results += each.run_block(block, beside_another=True)
            torch.rand(5)  # whatever happens between the turns must not matter
    assert [step.first_of_block for step in both[0].times] == [True, True, False, True]
    assert not any(step.first_of_block for step in alone.times)
    return [*losses, *in_turns]


def test_a_twin_changes_nothing(workers: WorkerPool) -> None:
    ((alone, first, second),) = workers.run(losses_with_and_without_a_twin, 1)
    assert alone == first == second


HELD_BACK_S = 0.05
STEPS = 6


def held_back(module: torch.nn.Module) -> Plan:
    """Return a plan whose one message is still under way when the update is asked for."""
    gradients: list[tuple[str, torch.nn.Parameter]] = []
    for named in module.named_parameters():
        named[1].register_post_accumulate_grad_hook(lambda _, named=named: gradients.append(named))
    module(torch.zeros(2, 3, 8, 8)).sum().backward()
    module.zero_grad()
    elements = sum(p.numel() for _, p in gradients)
    return Plan(
        planner="by hand",
        model=type(module).__name__,
        workers=2,
        tensors=tuple(Tensor(name=name, elements=p.numel()) for name, p in gradients),
        messages=(Message(start=0, stop=elements, delay_s=HELD_BACK_S),),
        wait="need",
    )


def what_is_pending_after_a_block(*, beside_another: bool, overlap: bool) -> dict[str, Any]:
    config = TrainingConfig.of("resnet20", "digits", overrides={"batch_size": 8}, overlap=overlap)
    task = task_of(config)
    worker = Worker(rank=torch.distributed.get_rank(), workers=2, device=CPU)
    steps = [batches for batches, _ in zip(task.steps(0, worker), range(STEPS), strict=False)]
    module = task.build()
    plan = held_back(task.build())
    ddp = DistributedDataParallel(module, plan=plan, check=False)
    replica = Replica(
        name="x",
        ddp=ddp,
        optimizer=sgd(ddp.module, config),
        task=task,
        config=config,
        worker=worker,
    )
    replica.run_block(steps, beside_another=beside_another)
    deferral = ddp._training.deferral
    pending = deferral is not None and deferral.pending
    replica.synchronize()
    assert deferral is None or not deferral.pending
    return {
        "pending": pending,
        "settled": replica.synchronizing_s > 0,
        "deferred": ddp.run_record().deferred,
        "weight": float(module.state_dict()["head.bias"].double().sum()),
    }


def test_a_turn_ends_with_nothing_left_to_do(workers: WorkerPool) -> None:
    for result in workers.run(turns, 2):
        alone, beside_another, plain = result["alone"], result["beside another"], result["plain"]
        assert (alone["pending"], alone["settled"], alone["deferred"]) == (True, False, True)
        assert (beside_another["pending"], beside_another["settled"]) == (False, True)
        assert (plain["pending"], plain["deferred"]) == (False, False)
        assert alone["weight"] == beside_another["weight"] == plain["weight"]


def turns() -> dict[str, dict[str, Any]]:
    found = {}
    for name, beside_another, overlap in (
        ("alone", False, True),
        ("beside another", True, True),
        ("plain", False, False),
    ):
        torch.manual_seed(0)
        found[name] = what_is_pending_after_a_block(beside_another=beside_another, overlap=overlap)
    return found
