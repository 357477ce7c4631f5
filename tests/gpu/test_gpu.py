"""What Syncline does on GPUs: with one, and with more where there are more.

`make test-gpu` runs it, and writes what was found; see docs/gpu.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import syncline
from syncline.bench.topk import measure_selection
from syncline.bench.topk_report import SELECT, TORCH
from tests.gpu import jobs
from tests.parallel.overlap.overlap_plans import Style
from tests.parallel.overlap.overlap_rig import OVERLAPS
from tests.workers import WorkerPool

pytestmark = pytest.mark.gpu

Figure = Callable[[str, float, str], None]
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL takes one rank a GPU, and there are fewer than two"
)
WAYS = [
    pytest.param("nccl", 1, id="nccl-1"),
    pytest.param("gloo", 2, id="gloo-2"),
    pytest.param("syncline", 2, id="syncline-2"),
    pytest.param("nccl", 2, id="nccl-2", marks=needs_two),
]
SCRIPTS: dict[str, dict[str, bool]] = {
    "adam": {},
    "clipping": {"clips": True},
    "compiled": {"compiled": True},
    "scaler": {"scales": True},
}


@pytest.mark.parametrize(("backend", "ranks"), WAYS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_bits_are_those_of_stock_ddp_however_late_messages_are(
    workers: WorkerPool, backend: str, ranks: int, script: str
) -> None:
    style = Style(piece_elements=20_000, norm="2" if script == "clipping" else None)
    job = jobs.beside_stock
    for found in workers.run(job, ranks, SCRIPTS[script], style, backend=backend):
        assert found["differences"] == []
        if script == "adam":
            assert found["happened"] == OVERLAPS


@pytest.mark.parametrize(("backend", "ranks"), WAYS)
def test_it_measures_plans_and_trains(
    workers: WorkerPool, backend: str, ranks: int, figure: Figure
) -> None:
    found = workers.run(jobs.automatic, ranks, 60, backend=backend)
    figure("60 iterations, measuring included", found[0]["seconds"], "s")
    for each in found:
        assert each["apart"] <= 1e-5


@pytest.mark.parametrize(
    ("backend", "ranks"), [*WAYS, pytest.param("cpu:syncline,cuda:nccl", 1, id="ours-and-nccl-1")]
)
def test_collectives_of_cuda_tensors(workers: WorkerPool, backend: str, ranks: int) -> None:
    for wrong in workers.run(jobs.collectives, ranks, backend=backend):
        assert wrong == []


@pytest.mark.parametrize("algorithm", [1, 2, 3])
def test_bsp_sgd_over_a_linear_pipeline(workers: WorkerPool, algorithm: int) -> None:
    for apart in workers.run(jobs.bsp, 2, algorithm, 20, backend="gloo"):
        assert apart <= 1e-5


def test_the_profiler_agrees_with_the_clock(figure: Figure) -> None:
    """Backward and forward pass by events, and the copies to the device, beside plain timing."""
    device = torch.device("cuda", 0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).to(device)
    batch = (torch.randn(512, 2048), torch.randn(512, 2048))
    profile = syncline.profile(
        model, itertools.repeat(batch), nn.functional.mse_loss, iterations=12
    )
    by_events_s = profile.computation_s
    inputs, targets = (part.to(device) for part in batch)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(12):
        if turn == 2:
            begin.record()
        nn.functional.mse_loss(model(inputs), targets).backward()
        model.zero_grad(set_to_none=True)
    end.record()
    torch.cuda.synchronize()
    by_clock_s = begin.elapsed_time(end) / 10 / 1e3
    figure("iteration by the profiler", by_events_s, "s")
    figure("iteration by two events around ten", by_clock_s, "s")
    assert by_events_s == pytest.approx(by_clock_s, rel=0.15)
    copy_s = sum(each.duration_s for each in profile.operations if each.phase == "copy")
    assert copy_s > 0
    figure("host to device, 8 MiB", copy_s, "s")


def test_selection_is_exact_and_its_speed_is_noted(figure: Figure) -> None:
    """It is compared with torch's first. The target of three times as fast is for bench-gpu."""
    found = measure_selection([25_000_000], [0.001], rounds=3, device="cuda")
    figure("selection beside torch.topk", found.times_faster(SELECT, TORCH, 25_000_000, 0.001), "x")


def test_a_graph_of_a_model_beside_an_exchange(tmp_path: Path, workers: WorkerPool) -> None:
    """A captured forward pass is replayed between steps after the updates were settled."""
    for found in workers.run(jobs.captured, 1, backend="nccl"):
        assert found == []


def test_memory_that_runs_out_while_measuring_is_said(workers: WorkerPool) -> None:
    for kind in workers.run(jobs.out_of_memory, 1, backend="nccl"):
        assert kind == "OutOfMemoryError"
