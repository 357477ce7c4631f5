"""What the GPU tests run, on the CPU: so that on a GPU the GPU alone is new."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.plan.profile import Norm
from tests.gpu import jobs, test_gpu
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import OVERLAPS
from tests.workers import WorkerPool


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("script", "norm"), test_gpu.SCRIPTS[:4])
def test_bits_are_those_of_stock_ddp(
    workers: WorkerPool, ranks: int, script: dict[str, bool], norm: Norm | None
) -> None:
    style = Style(piece_elements=20_000, norm=norm)
    for found in workers.run(jobs.beside_stock, ranks, "cpu", script, style):
        assert found["differences"] == []
        if not script:
            assert found["happened"] == OVERLAPS


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_measures_plans_and_trains(workers: WorkerPool, ranks: int) -> None:
    for found in workers.run(jobs.automatic, ranks, "cpu", 60):
        assert found["apart"] <= 1e-5


@pytest.mark.parametrize("backend", ["gloo", "syncline"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives(workers: WorkerPool, backend: str, ranks: int) -> None:
    for wrong in workers.run(jobs.collectives, ranks, "cpu", backend=backend):
        assert wrong == []


@pytest.mark.parametrize("algorithm", [1, 2, 3])
def test_bsp_sgd(workers: WorkerPool, tmp_path: Path, algorithm: int) -> None:
    for apart in workers.run(jobs.bsp, 2, "cpu", str(tmp_path), algorithm, 20):
        assert apart <= 1e-5


def test_parameters_stay_where_they_were_captured(workers: WorkerPool) -> None:
    assert workers.run(jobs.captured, 1, "cpu") == [[]]


def test_memory_that_runs_out_is_said(workers: WorkerPool) -> None:
    assert workers.run(jobs.out_of_memory, 1, "cpu") == ["RuntimeError"]


def test_iterations_are_profiled_and_timed() -> None:
    found = jobs.profiled("cpu", 32)
    assert found.profiled_s > 0
    assert min(found.by_clock_s) > 0
    assert found.copied_s == 0
