"""What Syncline does on GPUs: with one, and with more where there are more.

`make test-gpu` runs it, and writes what was found; see docs/gpu.md. Most of it runs on the CPU as
well: so on a GPU the GPU alone is new.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.selection import SELECT, TORCH, measure_selection

from syncline.plan.profile import Norm
from tests.gpu import jobs
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import OVERLAPS
from tests.workers import WorkerPool

Figure = Callable[[str, float, str], None]
gpu = pytest.mark.gpu
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL takes one rank a GPU, and there are fewer than two"
)
HERE = [pytest.param("cpu", "gloo", ranks, id=f"cpu-{ranks}") for ranks in (1, 2)]
ON_GPUS = [
    pytest.param("cuda", "nccl", 1, id="nccl-1", marks=gpu),
    pytest.param("cuda", "gloo", 2, id="gloo-2", marks=gpu),
    pytest.param("cuda", "syncline", 2, id="syncline-2", marks=gpu),
    pytest.param("cuda", "nccl", 2, id="nccl-2", marks=[gpu, needs_two]),
]
KINDS = ["cpu", pytest.param("cuda", marks=gpu)]
WAY = ("kind", "backend", "ranks")
NO_COMPILER = jobs.why_not_compiled()
SCRIPTS = [
    pytest.param({}, None, id="adam"),
    pytest.param({"clips": True}, None, id="clipping"),
    pytest.param({"clips": True}, "2", id="clipping by the plan's norm"),
    pytest.param({"scales": True}, None, id="scaler"),
]


@pytest.mark.parametrize(WAY, [*HERE, *ON_GPUS])
@pytest.mark.parametrize(("script", "norm"), SCRIPTS)
def test_bits_are_those_of_ddp_however_late_messages_are(
    workers: WorkerPool,
    kind: str,
    backend: str,
    ranks: int,
    script: dict[str, bool],
    norm: Norm | None,
) -> None:
    style = Style(piece_elements=20_000, norm=norm)
    for found in workers.run(jobs.beside_ddp, ranks, kind, script, style, backend=backend):
        assert found["differences"] == []
        if not script:
            assert found["happened"] == OVERLAPS


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize(WAY, ON_GPUS)
def test_bits_of_compiled_modules(workers: WorkerPool, kind: str, backend: str, ranks: int) -> None:
    given = kind, {"compiled": True}, Style(piece_elements=20_000)
    for found in workers.run(jobs.beside_ddp, ranks, *given, backend=backend):
        assert found["differences"] == []


@pytest.mark.parametrize(WAY, [*HERE, *ON_GPUS])
def test_it_measures_plans_and_trains(
    workers: WorkerPool, kind: str, backend: str, ranks: int, figure: Figure
) -> None:
    found = workers.run(jobs.automatic, ranks, kind, 60, backend=backend)
    figure("60 iterations, measuring included", found[0]["seconds"], "s")
    for each in found:
        assert each["apart"] <= 1e-5


@pytest.mark.parametrize(
    WAY,
    [
        *HERE,
        pytest.param("cpu", "syncline", 1, id="cpu-syncline-1"),
        pytest.param("cpu", "syncline", 2, id="cpu-syncline-2"),
        *ON_GPUS,
        pytest.param("cuda", "cpu:syncline,cuda:nccl", 1, id="ours-and-nccl-1", marks=gpu),
    ],
)
def test_collectives(workers: WorkerPool, kind: str, backend: str, ranks: int) -> None:
    for wrong in workers.run(jobs.collectives, ranks, kind, backend=backend):
        assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", [1, 2, 3])
def test_bsp_sgd_over_a_linear_pipeline(
    workers: WorkerPool, tmp_path: Path, algorithm: int, kind: str
) -> None:
    for apart in workers.run(jobs.bsp, 2, kind, str(tmp_path), algorithm, 20):
        assert apart <= 1e-5


@gpu
def test_the_profiler_agrees_with_the_clock(figure: Figure) -> None:
    """Passes by events, and the copies to the device, beside iterations in a row."""
    found = jobs.profiled("cuda", 2048)
    figure("iteration by the profiler", found.profiled_s, "s")
    figure("iteration by the clock, before", found.by_clock_s[0], "s")
    figure("iteration by the clock, after", found.by_clock_s[1], "s")
    figure("host to device, 8 MiB", found.copied_s, "s")
    assert 0.8 * min(found.by_clock_s) <= found.profiled_s <= 1.2 * max(found.by_clock_s)
    assert found.copied_s > 0


def test_iterations_are_profiled_and_timed() -> None:
    found = jobs.profiled("cpu", 32)
    assert found.profiled_s > 0
    assert min(found.by_clock_s) > 0
    assert found.copied_s == 0


@gpu
def test_selection_is_exact_and_its_speed_is_noted(figure: Figure) -> None:
    """It is compared with torch's first. The target of three times as fast is for bench-gpu."""
    found = measure_selection([25_000_000], [0.001], rounds=3, device="cuda")
    figure("selection beside torch.topk", found.times_faster(SELECT, TORCH, 25_000_000, 0.001), "x")


ALONE = [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=gpu)]


@pytest.mark.parametrize(("kind", "backend"), ALONE)
def test_a_graph_beside_an_exchange(workers: WorkerPool, kind: str, backend: str) -> None:
    """A captured forward pass is replayed between steps after the updates were settled."""
    assert workers.run(jobs.captured, 1, kind, backend=backend) == [[]]


@pytest.mark.parametrize(("kind", "backend"), ALONE)
def test_memory_that_runs_out_is_said(workers: WorkerPool, kind: str, backend: str) -> None:
    error = "OutOfMemoryError" if kind == "cuda" else "RuntimeError"
    assert workers.run(jobs.out_of_memory, 1, kind, backend=backend) == [error]
