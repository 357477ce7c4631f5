"""Twins in one process do not disturb each other's random numbers."""

from __future__ import annotations

import torch

from syncline.training.config import TrainingConfig
from syncline.training.group import Worker
from syncline.training.replica import Replica
from syncline.training.task import task_of
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
        return Replica(name="x", ddp=ddp, task=task, config=config, worker=worker)

    alone = replica()
    losses = [alone.run_block(steps, after_twin=False)]
    twins = replica(), replica()
    in_turns: tuple[list[float], list[float]] = ([], [])
    for block in (steps[:1], steps[1:3], steps[3:]):
        for twin, results in zip(twins, in_turns, strict=True):
            results += twin.run_block(block, after_twin=True)
            torch.rand(5)  # whatever happens between the turns must not matter
    assert [step.first_of_block for step in twins[0].times] == [True, True, False, True]
    assert not any(step.first_of_block for step in alone.times)
    return [*losses, *in_turns]


def test_a_twin_changes_nothing(workers: WorkerPool) -> None:
    ((alone, first, second),) = workers.run(losses_with_and_without_a_twin, 1)
    assert alone == first == second
