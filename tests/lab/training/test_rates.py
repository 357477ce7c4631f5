"""Rates count the same steady steps of both replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from syncline.lab.training.group import Worker
from syncline.lab.training.replica import StepTime
from syncline.lab.training.result import of_all_workers, rates
from tests.workers import WorkerPool


def steps(seconds: list[float], measuring: set[int], first: set[int]) -> list[StepTime]:
    return [
        StepTime(seconds=s, measuring=i in measuring, first_of_block=i in first)
        for i, s in enumerate(seconds)
    ]


def test_measuring_steps_and_first_steps_are_left_out_of_both() -> None:
    times = {
        "a": steps([9, 9, 9, 8, 2.0, 2.2, 1.8], measuring={0, 1, 2}, first={0, 3}),
        "b": steps([1, 1, 1, 8, 4.0, 4.0, 4.0], measuring=set(), first={0, 3}),
    }
    a, b = rates(times, 10)
    assert (a.name, a.iterations, b.name, b.iterations) == ("a", 3, "b", 3)
    assert a.iteration_s == pytest.approx(2.0)
    assert a.samples_per_s == pytest.approx(5.0)
    # The standard deviation is 0.2, and 4.303 the quantile of Student's t for three values.
    assert a.noise_s == pytest.approx(0.2 / 3**0.5 * 4.303 / 1.96)
    assert (b.iteration_s, b.noise_s) == (4.0, 0.0)


def test_training_that_ends_while_measuring_has_no_rates() -> None:
    times = {"a": steps([1, 1], {0, 1}, {0}), "b": steps([1, 1], set(), {0})}
    assert rates(times, 1) == ()


def steps_that_end_late_in_turns() -> list[StepTime]:
    rank = dist.get_rank()
    worker = Worker(rank=rank, workers=2, device=torch.device("cpu"))
    seconds = [1.0, 3.0, 1.0, 3.0] if rank == 0 else [3.0, 1.0, 3.0, 1.0]
    return of_all_workers(steps(seconds, measuring={0} if rank == 0 else {1}, first=set()), worker)


def test_a_step_that_ends_late_on_one_worker_is_not_a_longer_one(workers: WorkerPool) -> None:
    for found in workers.run(steps_that_end_late_in_turns, 2):
        assert found == steps([2.0] * 4, measuring={0, 1}, first=set())
