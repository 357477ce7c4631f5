"""A wrapped model that is dropped is freed, in whatever stage training is."""

from __future__ import annotations

import pytest

from tests.train import dropped_jobs as jobs
from tests.workers import WorkerPool


@pytest.mark.parametrize(
    "kind",
    [
        "profiling",
        "overlap_optimizers",
        "measuring DDP",
        "trying",
        "recording",
        "steady",
        "residuals",
    ],
)
def test_nothing_is_left_of_a_model_that_is_dropped(workers: WorkerPool, kind: str) -> None:
    nothing = {"kept": [], "on steps": 0}
    assert workers.run(jobs.dropped, 2, kind) == [nothing] * 2


@pytest.mark.parametrize("kind", ["profiling", "recording", "steady", "residuals"])
def test_the_model_stays_alone(workers: WorkerPool, kind: str) -> None:
    alone = {"kept": ["model", "parameter"], "hooks": 0, "on steps": 0}
    assert workers.run(jobs.dropped_but_kept, 2, kind) == [alone] * 2


def test_garbage_collection_waits_for_no_lock(workers: WorkerPool) -> None:
    """It may run on a thread that another one waits for under that lock."""
    assert workers.run(jobs.dropped_during_an_update, 2) == [True, True]
