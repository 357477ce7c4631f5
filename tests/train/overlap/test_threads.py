"""Threads that read while the main thread trains: its bits stay DDP's, whoever reads what."""

from __future__ import annotations

import pytest

from tests.cases import first_few
from tests.train.overlap import thread_jobs as jobs
from tests.train.overlap.loop import MAKERS
from tests.train.overlap.overlap_threads import AT_ANY_TIME
from tests.workers import WorkerPool


@pytest.mark.parametrize("make", first_few(MAKERS))
@pytest.mark.parametrize("backend", first_few(["gloo", "syncline"], 1))
def test_reads_without_end(workers: WorkerPool, make: str, backend: str) -> None:
    """Of everything, each in a thread of its own; some messages are there when ``step`` is called.

    Which thread makes an update is a matter of luck, and must not count for what ranks agree on.
    """
    results = workers.run(jobs.reads_beside_ddp, 2, make, AT_ANY_TIME, backend=backend)
    assert [result["differences"] for result in results] == [[], []]
    assert results[0]["parameters"] == results[1]["parameters"]
    assert [result["forced"] for result in results] == [None, None]


def test_an_update_that_a_thread_makes_is_waited_for(workers: WorkerPool) -> None:
    """By the forward pass, while ``zero_grad`` and a schedule go on as after a step."""
    assert workers.run(jobs.forward_beside_an_update, 2, False) == [[], []]


def test_without_the_lock_it_is_not(workers: WorkerPool) -> None:
    for differences in workers.run(jobs.forward_beside_an_update, 2, True):
        assert differences


def test_a_thread_never_sees_half_of_an_update(workers: WorkerPool) -> None:
    """Of parameters, the optimizer's state, averages and clipped gradients."""
    for seen in workers.run(jobs.reads_beside_an_update, 2):
        assert set(seen) == {"parameter", "state", "gradient", "average"}
        for what, (found, whole) in seen.items():
            assert found == whole, what


def test_a_fork_waits_for_an_update(workers: WorkerPool) -> None:
    assert workers.run(jobs.forks_beside_an_update, 1) == ["whole"]
