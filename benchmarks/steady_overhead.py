"""Steady-state cost of Syncline's wrapper over torch's own class, where DDP's buckets are kept.

Three models with equal weights train side by side in the same workers: one under Syncline's
DistributedDataParallel in its steady state, one under a wrapper of torch's that was made before the
first iteration, and one under a wrapper of torch's that was made when Syncline had measured, since
Syncline makes torch's reducer anew then. All have the same buckets. They take turns in blocks of
steps; the ratio of neighbouring blocks is one sample, so that slow drifts of the machine cancel.
What Syncline's wrapper itself executes in an iteration is the difference between the two on one
worker with a model of two small layers.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.common import median, save
from syncline.lab.training.models.vision import ResNet20
from syncline.train.ddp import DistributedDataParallel

BLOCK = 10
ROUNDS = 60
OWN_BLOCK, OWN_ROUNDS = 100, 40
WORKERS = 2
SYNCLINE, EARLY, LATE = "syncline", "torch", "torch, made later"


def worker(result: str) -> None:
    """Train in turns; rank 0 writes the times of the blocks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = ResNet20(10)
    twins = {name: copy.deepcopy(module) for name in (EARLY, LATE)}
    ours = DistributedDataParallel(module, planner="ddp", cache=False)
    inputs, targets = torch.randn(32, 3, 8, 8), torch.randint(10, (32,))
    block = functools.partial(seconds_a_step, inputs=inputs, targets=targets)
    wrappers = {SYNCLINE: ours, EARLY: TorchDDP(twins[EARLY])}
    block(wrappers[EARLY])
    while ours.measuring:
        block(ours, steps=1)
    wrappers[LATE] = TorchDDP(twins[LATE])
    for ddp in wrappers.values():
        block(ddp)
    order = list(wrappers)
    rounds = []
    for _ in range(ROUNDS):
        order = order[1:] + order[:1]
        rounds.append({name: block(wrappers[name]) for name in order})
    assert not ours.measuring, "the machine's speed changed and Syncline measures again; try later"
    buckets = {ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"] for ddp in wrappers.values()}
    assert len(buckets) == 1, f"expected the same buckets, found {buckets}"
    found = {"rounds_s": rounds, "bucket_bytes": buckets.pop(), "own_code_s": own_code_s()}
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def seconds_a_step(
    ddp: TorchDDP, *, inputs: torch.Tensor, targets: torch.Tensor, steps: int = BLOCK
) -> float:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps


def own_code_s() -> float:
    """Return the seconds an iteration of the wrapper's own code."""
    alone = [dist.new_group([rank]) for rank in range(WORKERS)][dist.get_rank()]
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    stock = TorchDDP(copy.deepcopy(module), process_group=alone)
    ours = DistributedDataParallel(module, planner="ddp", check=False, process_group=alone)
    inputs, targets = torch.randn(8, 4), torch.randint(4, (8,))
    block = functools.partial(seconds_a_step, inputs=inputs, targets=targets, steps=OWN_BLOCK)
    while ours.measuring:
        block(ours)
    block(stock)
    return median([block(ours) - block(stock) for _ in range(OWN_ROUNDS)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    runs = [measured() for _ in range(parser.parse_args().runs)]
    rounds = [times for run in runs for times in run["rounds_s"]]
    print(
        f"resnet20 on 8x8 images, {WORKERS} workers, DDP's buckets; {len(runs)} runs of {ROUNDS} "
        f"rounds of {BLOCK} steps each; torch {median([t[EARLY] for t in rounds]) * 1e3:.2f} ms a "
        f"step; Syncline's own code {median([run['own_code_s'] for run in runs]) * 1e6:.1f} us"
    )
    overhead = {}
    for name in (SYNCLINE, LATE):
        by_run = [median([t[name] / t[EARLY] - 1 for t in run["rounds_s"]]) for run in runs]
        overhead[name] = median([times[name] / times[EARLY] - 1 for times in rounds])
        shown = ", ".join(f"{value:+.1%}" for value in by_run)
        print(f"{name} over {EARLY}: {overhead[name]:+.2%} (runs: {shown})")
    save("steady_overhead", {"workers": WORKERS, "overhead": overhead, "runs": runs})


def measured() -> dict[str, Any]:
    """Return what a job has measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}"]
        command += ["-m", "benchmarks.steady_overhead", "worker", str(result)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(result.read_text())
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2])
    else:
        main()
