"""One rank, in a process group of its own: Syncline beside torch's class where nothing is gained.

Syncline keeps DDP's buckets. It lets the reducer's own timers run in one iteration of 5, torch's
class in one of 100, and on a GPU the next forward pass waits for them: so both are also measured
with the other's setting, which shows how much of the difference that is.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.common import median
from benchmarks.device_collectives import finish
from syncline.train.ddp import DistributedDataParallel
from syncline.train.watches import SAMPLE_EVERY

STOCK, OURS = "torch's class", "Syncline"
USUAL = 100
"""One iteration in so many is timed by torch's class."""
LAYERS, BATCH = 12, 256
BLOCK_S = 0.1


def steady_rows(kind: str, width: int, rounds: int) -> list[dict[str, Any]]:
    """Measure in turns of blocks, each contestant on a model of its own."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _rows(device, width, rounds)
    finally:
        dist.destroy_process_group()


def _rows(device: torch.device, width: int, rounds: int) -> list[dict[str, Any]]:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)))
    batch = torch.randn(BATCH, width, device=device)
    contestants: dict[str, tuple[TorchDDP, torch.optim.Optimizer]] = {}
    for name, every in ((STOCK, USUAL), (STOCK, SAMPLE_EVERY), (OURS, SAMPLE_EVERY), (OURS, USUAL)):
        own = copy.deepcopy(net).to(device)
        if name == STOCK:
            model = TorchDDP(own)
        else:
            model = DistributedDataParallel(own, planner="ddp", check=False, cache=False)
        model._set_ddp_runtime_logging_sample_rate(every)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        contestants[f"{name}, timed in 1 of {every}"] = model, optimizer

    def block_s(name: str, steps: int) -> float:
        model, optimizer = contestants[name]
        finish(device)
        began_s = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        finish(device)
        return (time.perf_counter() - began_s) / steps

    for name, (model, _) in contestants.items():
        block_s(name, 20)
        while isinstance(model, DistributedDataParallel) and model.measuring:
            block_s(name, 20)
    names = list(contestants)
    steps = max(5, round(BLOCK_S / block_s(names[0], 20)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            times[name].append(block_s(name, steps))
    stock = times[names[0]]
    return [
        {
            "width": width,
            "contestant": name,
            "iteration_s": median(found),
            "above torch's class": median([a / b - 1 for a, b in zip(found, stock, strict=True)]),
            "rounds_s": found,
        }
        for name, found in times.items()
    ]
