"""The learning rate rises over the warm-up and falls as the schedule says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.lab.training.config import SCHEDULES, Hyperparameters, ScheduleName
from syncline.lab.training.replica import learning_rate_factor, scheduler


def factors(schedule: ScheduleName, *, epochs: int = 8, warmup: float = 0.0) -> list[float]:
    hyper = Hyperparameters(
        epochs=epochs, batch_size=1, learning_rate=1, schedule=schedule, warmup_epochs=warmup
    )
    return [learning_rate_factor(step, 10, hyper) for step in range(epochs * 10)]


def test_constant_stays() -> None:
    assert set(factors("constant")) == {1.0}


def test_step_divides_by_ten_at_half_and_three_quarters() -> None:
    values = factors("step")
    assert values[:40] == [1.0] * 40
    assert values[40:60] == pytest.approx([0.1] * 20)
    assert values[60:] == pytest.approx([0.01] * 20)


def test_cosine_falls_from_one_to_nearly_zero() -> None:
    values = factors("cosine")
    assert values[0] == 1.0
    assert values[40] == pytest.approx(0.5)
    assert 0 < values[-1] < 0.001
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_rises_linearly_to_the_full_rate(schedule: ScheduleName) -> None:
    values = factors(schedule, warmup=2)
    assert values[:19] == pytest.approx([(step + 1) / 20 for step in range(19)])
    assert max(values) <= 1.0
    assert values[20] == 1.0


@given(
    schedule=st.sampled_from(SCHEDULES),
    epochs=st.integers(1, 5),
    warmup=st.floats(0, 10),
    step=st.integers(0, 100),
)
def test_every_factor_is_between_zero_and_one(
    schedule: ScheduleName, epochs: int, warmup: float, step: int
) -> None:
    hyper = Hyperparameters(
        epochs=epochs, batch_size=1, learning_rate=1, schedule=schedule, warmup_epochs=warmup
    )
    assert 0 <= learning_rate_factor(step, 10, hyper) <= 1


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
