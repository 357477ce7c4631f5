"""Stepping ahead with residuals, through DDP's hook."""

from __future__ import annotations

import numpy as np
import pytest

from tests.train.sparse import jobs
from tests.workers import WorkerPool


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_weights_are_ahead_by_the_residuals_until_the_update(
    workers: WorkerPool, momentum: float
) -> None:
    for right in workers.run(jobs.moved_ahead, 2, momentum):
        assert right
        assert [what for what, is_so in right.items() if not is_so] == []


@pytest.mark.slow
def test_what_waits_is_not_asked_for_again(workers: WorkerPool) -> None:
    assert max(workers.run(jobs.overshoots, 2, True)) < 0.01
    assert max(workers.run(jobs.overshoots, 2, False)) > 1


def test_a_parameter_may_join_while_others_are_ahead(workers: WorkerPool) -> None:
    steps = [False, False, True, False, True, False, True, True]
    assert workers.run(jobs.joined_while_ahead, 2) == [steps, steps]


def test_with_nothing_left_over_nothing_changes(workers: WorkerPool) -> None:
    recipe = {"density": 1.0}
    plainly = workers.run(jobs.hooked, 2, recipe, 4)
    ahead = workers.run(jobs.hooked, 2, recipe, 4, {"ahead": True})
    for (losses, parameters, _), (expected, others, _) in zip(ahead, plainly, strict=True):
        assert losses == expected
        assert all(np.array_equal(parameters[name], others[name]) for name in others)


def test_a_checkpoint_goes_on_bit_for_bit(workers: WorkerPool) -> None:
    assert workers.run(jobs.resumed, 2, {"density": 0.05, "momentum": 0.9}, True) == [True, True]


@pytest.mark.parametrize("by", ["closure", "another optimizer"])
def test_an_update_is_made_where_the_weights_belong(workers: WorkerPool, by: str) -> None:
    assert workers.run(jobs.updated_ahead, 2, by) == [[True] * 4] * 2


def test_copies_do_not_step_ahead(workers: WorkerPool) -> None:
    assert workers.run(jobs.copied_ahead, 2) == [[True, True]] * 2


def test_it_ends_with_the_state(workers: WorkerPool) -> None:
    assert workers.run(jobs.dropped_ahead, 2) == [[True] * 5] * 2


def test_one_that_steps_ahead_alone_is_told(workers: WorkerPool) -> None:
    """Or dropped sums could wait on no rank, or on two."""
    for found in workers.run(jobs.one_ahead_alone, 2):
        assert "MismatchError" in found
        assert "let all step ahead or none" in found


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("adam", "UserError: step_ahead needs torch.optim.SGD, for which it is known where"),
        ("dampening", "UserError: step_ahead knows SGD that descends without dampening, with a"),
        ("ascent", "dampening=0 and maximize=True"),
        ("momentum", "group 0 has momentum=1.0, "),
        ("all dense", "UserError: step_ahead is for what sparse exchange leaves behind; this"),
        ("other model", "UserError: step_ahead: the optimizer updates no parameter that is exch"),
        ("twice", "not stepped ahead with yet; give each optimizer of this model once"),
    ],
)
def test_other_optimizers_are_refused(workers: WorkerPool, case: str, said: str) -> None:
    for found in workers.run(jobs.ahead_refusals, 2, case):
        assert said in found
