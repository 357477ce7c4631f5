"""BSP-SGD where computing is waiting: the overlap that linear-pipeline claims in section 4.2.

Equal layers are trained on emulated hosts with a link each. Their passes only wait, so no rank
takes another's processor, and computing takes as long as one reduce and one broadcast of all
weights at the rate of the links. The three algorithms take turns with torch's
DistributedDataParallel, and with no exchange at all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import median, save
from syncline.groups import Group
from syncline.parallel.bsp import BspSgd
from syncline.processes import run_folder
from syncline.replay.contest import Contestant, run_contest, stock_ddp
from syncline.replay.model import Replayed, ReplayedOptimizer
from syncline.testbed import Cluster, Testbed
from syncline.traces.layers import Layer, profile_of

HOSTS, RATE = 4, "200mbit"
LAYERS, LAYER_BYTES = 12, 1 << 20
ROUNDS, ITERATIONS, WARM_UP = 5, 2, 1
FAMILY = "linear-pipeline"
TIMEOUT_S = 175.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, help="work as a rank; rank 0 writes here")
    to: Path | None = parser.parse_args().to
    cluster = Cluster.of(hosts=HOSTS, rate=RATE)
    assert cluster.rate_bytes_per_s is not None
    one_way_s = LAYERS * LAYER_BYTES / cluster.rate_bytes_per_s
    if to is not None:
        work(one_way_s, to)
        return
    with run_folder() as folder, Testbed(cluster) as bed:
        found = folder / "found.json"
        command = [sys.executable, "-m", "benchmarks.bsp_hosts", "--to", str(found)]
        result = bed.run(command, timeout_s=TIMEOUT_S)
        if not found.exists():
            raise SystemExit(f"the ranks failed: {''.join(result.stderr)}")
        rounds_s = json.loads(found.read_text())
    for name, each_s in rounds_s.items():
        print(f"{name}: {median(each_s):.3f} s ({min(each_s):.3f} to {max(each_s):.3f})")
    save(
        "bsp_hosts",
        {
            "hosts": HOSTS,
            "rate": RATE,
            "layers": LAYERS,
            "layer_bytes": LAYER_BYTES,
            "collectives": FAMILY,
            "compute_s": 2 * one_way_s,
            "one_way_s": one_way_s,
            "iterations": ITERATIONS,
            "rounds_s": rounds_s,
        },
    )


def work(one_way_s: float, to: Path) -> None:
    """Let everyone take turns; rank 0 writes the seconds of an iteration in every round."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    store = dist.PrefixStore("bsp", dist.distributed_c10d._get_default_store())
    group = Group(store, dist.get_rank(), dist.get_world_size())
    forward_s, backward_s = (2 * one_way_s * share / LAYERS for share in (1 / 3, 2 / 3))
    profile = profile_of(
        [
            Layer(
                name=f"layer{number}",
                forward_s=forward_s,
                weight_s=backward_s,
                gradient_bytes=LAYER_BYTES,
            )
            for number in range(LAYERS)
        ],
        model="equal layers",
    )
    contestants = [
        Contestant(name="alone", wrap=lambda module, optimizer: (module, optimizer)),
        stock_ddp(),
        *(_bsp(algorithm, group) for algorithm in (1, 2, 3)),
    ]
    laps = run_contest(profile, contestants, rounds=ROUNDS, iterations=ITERATIONS, warmup=WARM_UP)
    if dist.get_rank() == 0:
        rounds_s = {name: [lap.iteration_s for lap in each] for name, each in laps.items()}
        to.write_text(json.dumps(rounds_s))
    dist.barrier()
    group.close()
    dist.destroy_process_group()


def _bsp(algorithm: int, group: Group) -> Contestant:
    def wrap(module: Replayed, optimizer: ReplayedOptimizer) -> tuple[Any, Any]:
        model = BspSgd(module, optimizer, group, algorithm=algorithm, collectives=FAMILY)
        return model, optimizer

    def is_ready(model: BspSgd) -> bool:
        return not model.measuring

    return Contestant(
        name=f"bsp-{algorithm}", wrap=wrap, is_ready=is_ready, settle=lambda model: model.settle()
    )


if __name__ == "__main__":
    main()
