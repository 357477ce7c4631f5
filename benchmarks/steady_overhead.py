"""Steady-state cost of Syncline's wrapper over torch's own class with the same buckets.

Two models with equal weights train side by side in the same workers: one under Syncline's
DistributedDataParallel in its steady state, one under torch's with ``bucket_cap_mb_list`` set to
the same messages. They take turns in blocks of steps; the ratio of each pair of neighbouring
blocks is one sample, so that slow drifts of the machine cancel. What the wrapper itself executes in
an iteration, its exchange between the ranks every 50 iterations included, is timed apart: the rest
is torch's own class.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.common import median, save
from syncline.parallel.ddp import DistributedDataParallel
from syncline.parallel.stage_runner import Forward
from syncline.training.models.vision import ResNet20

BLOCK = 10
PAIRS = 60
OWN = 2000
WORKERS = 2


def worker(result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = ResNet20(10)
    twin = copy.deepcopy(module)
    ours = DistributedDataParallel(module, planner="merge", check=False)
    inputs, targets = torch.randn(32, 3, 8, 8), torch.randint(10, (32,))
    optimizers = {}

    def block(ddp: TorchDDP, steps: int) -> float:
        optimizer = optimizers.setdefault(
            ddp, torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        )
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
        return (time.perf_counter() - start) / steps

    while ours.measuring:
        block(ours, 1)
    assert ours.plan is not None
    caps_mb = [size_bytes / (1 << 20) for size_bytes in ours.plan.message_bytes()]
    stock = TorchDDP(twin, bucket_cap_mb_list=caps_mb)
    block(ours, BLOCK)
    block(stock, BLOCK)
    pairs = []
    for number in range(PAIRS):
        order = (ours, stock) if number % 2 else (stock, ours)
        took = {ddp is ours: block(ddp, BLOCK) for ddp in order}
        pairs.append((took[True], took[False]))
    assert not ours.measuring, "the machine's speed changed and Syncline measures again; try later"
    same = ours._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert same == stock._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    runner = ours._runner
    assert runner is not None
    start = time.perf_counter()
    for _ in range(OWN):
        runner.begin_forward(Forward.EXCHANGED)
        runner.end_forward(Forward.EXCHANGED, None)
    own_s = (time.perf_counter() - start) / OWN
    if dist.get_rank() == 0:
        found = {"pairs_s": pairs, "bucket_bytes": same, "own_code_s": own_s}
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={WORKERS}",
                "-m",
                "benchmarks.steady_overhead",
                "worker",
                str(result),
            ],
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        measured = json.loads(result.read_text())
    ratios = [ours / stock for ours, stock in measured["pairs_s"]]
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    print(
        f"resnet20 on 8x8 images, {WORKERS} workers, {len(ratios)} interleaved pairs of {BLOCK} "
        f"steps: Syncline {median([o for o, _ in measured['pairs_s']]) * 1e3:.2f} ms, torch "
        f"{median([s for _, s in measured['pairs_s']]) * 1e3:.2f} ms a step\n"
        f"overhead {median(ratios) - 1:+.2%} (quartiles {ordered[quarter] - 1:+.2%} .. "
        f"{ordered[-quarter - 1] - 1:+.2%}); the wrapper's own code takes "
        f"{measured['own_code_s'] * 1e6:.1f} us an iteration, "
        f"{measured['own_code_s'] / median([s for _, s in measured['pairs_s']]):.3%}"
    )
    save("steady_overhead", {"workers": WORKERS, "overhead": median(ratios) - 1, **measured})


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2])
    else:
        main()
