"""Contestants exchange real gradients in turns, and leave nothing behind."""

from __future__ import annotations

import pytest

from syncline.plan.timeline import Timeline
from tests.cases import first_few
from tests.lab.replay import jobs
from tests.workers import WorkerPool

PLANNERS = ("wfbp", "p3", "dear")
"""A plan that is buckets, one of pieces by need, and one that is decoupled."""
OTHERS = ("single", "merge", "horovod", "tictac", "overlap")


@pytest.mark.parametrize(
    ("ranks", "planners"), first_few([(3, PLANNERS), (3, OTHERS), (2, PLANNERS), (2, OTHERS)])
)
def test_every_contestant_averages_the_gradients(
    workers: WorkerPool, ranks: int, planners: tuple[str, ...]
) -> None:
    for seen in workers.run(jobs.averages, ranks, planners):
        assert seen.keys() == {"ddp", *planners}
        for name, (gradients, expected) in seen.items():
            assert len(gradients) >= 4 * (jobs.WARMUP + jobs.ITERATIONS)
            assert gradients == pytest.approx(expected), name


def test_turns_and_laps(workers: WorkerPool) -> None:
    (told, laps), (_, others) = workers.run(jobs.turns, 2)
    assert [name for name, *_ in told] == [
        *("ddp", "small", "mine"),
        *("small", "mine", "ddp"),
        *("mine", "ddp", "small"),
    ]
    assert [lap[1:] for lap in told] == [(i // 3, i + 1, 9) for i in range(9)]
    assert laps.keys() == {"ddp", "small", "mine"}
    for name, of_one in laps.items():
        assert len(of_one) == 3
        for lap, other in zip(of_one, others[name], strict=True):
            assert 0 < lap["iteration_s"] <= lap["settled_s"]
            assert lap["idle_s"] >= 0
            assert lap["steps"] == jobs.ITERATIONS
            assert lap["iteration_s"] == other["iteration_s"]
            timeline = Timeline.from_json(lap["timeline"])
            assert timeline.name == name
            kinds = {span.kind for span in timeline.spans}
            assert {"forward", "backward", "update"} <= kinds


def test_an_exchange_under_the_forward_pass(workers: WorkerPool) -> None:
    for kinds, iteration_s in workers.run(jobs.overlapped, 2):
        assert {"forward", "backward", "update", "message"} <= set(kinds)
        assert iteration_s > 0


def test_nothing_is_left(workers: WorkerPool) -> None:
    for threads, modules in workers.run(jobs.left_behind, 2):
        assert threads == set()
        assert modules == 0


def test_bad_contests(workers: WorkerPool) -> None:
    [said, _] = workers.run(jobs.refusals, 2)
    assert len(said) == 3
    assert "different names, found []" in said[0]
    assert "different names, found ['ddp', 'ddp']" in said[1]
    assert "warmup must be at least 1, found 0" in said[2]


def test_a_contestant_that_does_not_get_ready(workers: WorkerPool) -> None:
    for said in workers.run(jobs.never_ready, 2):
        assert said == "contestant 'slow' was not ready after 100 iterations"


def test_a_plan_that_cannot_run_is_an_error_and_no_other_measurement(workers: WorkerPool) -> None:
    for said in workers.run(jobs.unplannable, 2):
        assert "the plan of 'wfbp' did not run: " in said


def test_a_contestant_of_ones_own(workers: WorkerPool) -> None:
    for iteration_s, settled_s, idle_s in workers.run(jobs.own_contestant, 2):
        assert 0 < iteration_s <= settled_s
        assert idle_s >= 0
