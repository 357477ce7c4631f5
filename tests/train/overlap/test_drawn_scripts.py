"""Training scripts that are drawn at random give the same bits as under DDP.

``tools/fuzz-training`` runs thousands of them.
"""

from __future__ import annotations

import pytest

from tests.cases import first_few
from tests.train.overlap import overlap_jobs
from tests.train.overlap.drawn_scripts import drawn
from tests.workers import WorkerPool


@pytest.mark.parametrize(
    ("ranks", "first", "scripts"), first_few([(2, 0, 2), (2, 10, 6), (3, 100, 6)])
)
def test_drawn_scripts(workers: WorkerPool, ranks: int, first: int, scripts: int) -> None:
    by_hand = [n for n in range(first, first + 2 * scripts) if drawn(n).plans == "by hand"]
    numbers = by_hand[:scripts]
    results = workers.run(overlap_jobs.drawn_beside_ddp, ranks, numbers, backend="syncline")
    for number, *everyone in zip(numbers, *results, strict=True):
        for result in everyone:
            assert result["differences"] == [], f"{drawn(number)}\n{result['errors'][0]}"
            same = result["parameters"] == everyone[0]["parameters"]
            assert same, f"{drawn(number)}: desynchronized"
