"""Averages that cannot be kept are refused; what becomes of others the feature rows show."""

from __future__ import annotations

from tests.train import jobs
from tests.workers import WorkerPool


def test_averages_that_do_not_fit(workers: WorkerPool) -> None:
    for few, odd in workers.run(jobs.unfit_averages, 2):
        assert "expected an average for each of the 8 parameters, found 7" in few
        assert "expected shape (8, 1, 3, 3) of average 0, as its parameter has, found (2,)" in odd
