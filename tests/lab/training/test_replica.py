"""Replicas in one process do not disturb each other, and follow their learning rate."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.lab.training.config import SCHEDULES, Hyperparameters, ScheduleName, TrainingConfig
from syncline.lab.training.data.sampling import Batch
from syncline.lab.training.group import Worker
from syncline.lab.training.replica import Replica, learning_rate_factor, scheduler, sgd
from syncline.lab.training.task import task_of
from syncline.plan.plan import Plan
from syncline.train.ddp import DistributedDataParallel
from syncline.train.overlap.pending import is_pending
from tests.train.overlap.overlap_plans import Style, plan_of, ready_order
from tests.workers import WorkerPool


def worker_of(config: TrainingConfig) -> Worker:
    rank = torch.distributed.get_rank()
    return Worker(rank=rank, workers=config.workers, device=torch.device("cpu"))


def steps_of(config: TrainingConfig, count: int) -> list[tuple[Batch, ...]]:
    return list(itertools.islice(task_of(config).steps(0, worker_of(config)), count))


def replica_of(config: TrainingConfig, wrap: Callable[[nn.Module], Any]) -> Replica:
    task = task_of(config)
    ddp = wrap(task.build())
    own: Any = {"config": config, "worker": worker_of(config)}
    return Replica(name="x", ddp=ddp, optimizer=sgd(ddp.module, config), task=task, **own)


def losses_alone_and_beside_another() -> list[list[float]]:
    config = TrainingConfig.of(
        "transformer", "text", workers=1, overrides={"batch_size": 2}, planner="ddp"
    )
    steps = steps_of(config, 4)

    def replica() -> Replica:
        torch.manual_seed(3)
        return replica_of(config, nn.parallel.DistributedDataParallel)

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


def test_another_replica_changes_nothing(workers: WorkerPool) -> None:
    ((alone, first, second),) = workers.run(losses_alone_and_beside_another, 1)
    assert alone == first == second


def held_back(module: nn.Module) -> Plan:
    """Return a plan whose one message is still under way when the update is asked for."""
    order = ready_order(module, lambda net: net(torch.zeros(2, 3, 8, 8)).sum())
    whole = sum(p.numel() for p in module.parameters())
    return plan_of(module, order, 2, Style(piece_elements=whole, delay_s=0.05, in_flight=1))


def pending_after_a_block(*, beside_another: bool, overlap: bool) -> tuple[bool, bool, bool, float]:
    """Return whether updates are pending, whether synchronizing took time, and the weights."""
    config = TrainingConfig.of("resnet20", "digits", overrides={"batch_size": 8}, overlap=overlap)
    plan = held_back(task_of(config).build())
    wrap = functools.partial(DistributedDataParallel, plan=plan, check=False)
    replica = replica_of(config, wrap)
    ddp = replica.ddp
    replica.run_block(steps_of(config, 6), beside_another=beside_another)
    pending = any(map(is_pending, ddp.parameters()))
    synchronized = replica.synchronizing_s > 0
    replica.synchronize()
    assert not any(map(is_pending, ddp.parameters()))
    weight = float(replica.module.state_dict()["head.bias"].double().sum())
    return pending, synchronized, ddp.run_record().deferred, weight


def turns() -> list[tuple[bool, bool, bool, float]]:
    found = []
    for beside_another, overlap in ((False, True), (True, True), (False, False)):
        torch.manual_seed(0)
        found.append(pending_after_a_block(beside_another=beside_another, overlap=overlap))
    return found


def test_a_turn_ends_with_nothing_left_to_do(workers: WorkerPool) -> None:
    for found in workers.run(turns, 2):
        alone, beside_another, plain = (each[:3] for each in found)
        assert alone == (True, False, True)
        assert beside_another == (False, True, True)
        assert plain == (False, False, False)
        assert len({weight for *_, weight in found}) == 1


def factors(
    schedule: ScheduleName, *, epochs: int = 8, warmup: float = 0.0, steps: int = 80
) -> list[float]:
    hyper = Hyperparameters(
        epochs=epochs, batch_size=1, learning_rate=1, schedule=schedule, warmup_epochs=warmup
    )
    return [learning_rate_factor(step, 10, hyper) for step in range(steps)]


def test_each_schedule() -> None:
    assert set(factors("constant")) == {1.0}
    step = factors("step")
    assert step == pytest.approx([1.0] * 40 + [0.1] * 20 + [0.01] * 20)
    cosine = factors("cosine")
    assert cosine[0] == 1.0
    assert cosine[40] == pytest.approx(0.5)
    assert 0 < cosine[-1] < 0.001
    assert cosine == sorted(cosine, reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_rises_linearly_to_the_full_rate(schedule: ScheduleName) -> None:
    values = factors(schedule, warmup=2)
    assert values[:19] == pytest.approx([(step + 1) / 20 for step in range(19)])
    assert max(values) <= 1.0
    assert values[20] == 1.0


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.floats(0, 10))
def test_every_factor_is_from_0_to_1(schedule: ScheduleName, epochs: int, warmup: float) -> None:
    found = factors(schedule, epochs=epochs, warmup=warmup, steps=101)
    assert all(0 <= factor <= 1 for factor in found)


def test_scheduler_drives_the_optimizer() -> None:
    hyper = Hyperparameters(epochs=2, batch_size=1, learning_rate=0.4, warmup_epochs=1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=hyper.learning_rate)
    schedule = scheduler(optimizer, 4, hyper)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.4 * learning_rate_factor(s, 4, hyper) for s in range(8)])
