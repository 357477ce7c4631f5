"""Gradients that nobody exchanges are told once, and only these."""

from __future__ import annotations

import re

from tests.train import unexchanged_jobs
from tests.workers import WorkerPool

TOLD = {
    "past the wrapper": "the parameters 3 times, but .* never called.*call the wrapper",
    "thawed": r"nothing exchanges \('hidden.weight', 'hidden.bias'\).*wrap the model again after",
    "added": r"nothing exchanges \('adapter.weight', 'adapter.bias'\).*or were not there yet",
}


def test_gradients_that_nobody_exchanges_are_told(workers: WorkerPool) -> None:
    found, other = workers.run(unexchanged_jobs.said, 2, list(TOLD))
    for kind, pattern in TOLD.items():
        (text,) = found[kind]
        assert re.search(pattern, text), text
        assert other[kind] == []  # one rank is enough


def test_ordinary_trainings_are_left_alone(workers: WorkerPool) -> None:
    kinds = [kind for kind in unexchanged_jobs.LOOPS if kind not in TOLD]
    for found in workers.run(unexchanged_jobs.said, 2, kinds):
        assert found == {kind: [] for kind in kinds}
