"""Ranks that make different forward passes train as under DDP, and nobody waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import first_few
from tests.train import uneven_jobs
from tests.workers import WorkerPool


@pytest.mark.parametrize(
    "arguments", first_few([{"planner": "overlap"}, {"planner": "wfbp"}]), ids=str
)
@pytest.mark.parametrize("kind", first_few(uneven_jobs.LOOPS))
def test_only_exchanged_backward_passes_count(
    workers: WorkerPool, kind: str, arguments: dict[str, Any]
) -> None:
    _train_as_stock(workers, kind, arguments)


@pytest.mark.parametrize(
    "arguments",
    first_few([{"planner": "overlap"}, {"planner": "wfbp", "gradient_as_bucket_view": True}]),
    ids=str,
)
@pytest.mark.parametrize("kind", first_few(reversed(uneven_jobs.LOOPS)))
def test_static_graphs(workers: WorkerPool, kind: str, arguments: dict[str, Any]) -> None:
    _train_as_stock(workers, kind, arguments | {"static_graph": True})


def _train_as_stock(workers: WorkerPool, kind: str, arguments: dict[str, Any]) -> None:
    for result in workers.run(uneven_jobs.beside_stock, 2, kind, arguments):
        assert result["differences"] == []
        assert result["decision"] == "planned"
        assert result["timeline"]
        twice = result["steps"] - result["alike"] if kind == "twice" else 0
        assert result["iterations"] == result["steps"] + twice


@pytest.mark.parametrize("static", [False, True])
def test_backward_passes_inside_others_count_once(workers: WorkerPool, static: bool) -> None:
    for result in workers.run(uneven_jobs.all_inside, 2, static):
        assert result == {"differences": [], "iterations": 0}
