"""PACE's Fig. 10 measured: what passes a host's network interface in every 5 ms.

ResNet-50 is replayed between emulated hosts, with plans for a ring over their links. Links are slow
and computation as much slower, so that processors limit neither. With ``--training`` it is trained
instead, as by ``syncline train``, on two hosts with a processor each. Rank 0 reads its
interface's counter in a thread of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import save
from benchmarks.step_cells import Cell
from benchmarks.step_models import MODELS
from syncline.lab.processes import run_folder
from syncline.lab.replay.interleaved import planned, run_interleaved
from syncline.lab.testbed import Cluster, Testbed
from syncline.lab.testbed.cluster import DEVICE
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.loop import train
from syncline.lab.training.progress import Snapshot, TrainingProgress
from syncline.plan.network import Link, Network
from syncline.plan.planners import planner_named
from syncline.plan.planners.overlap import Overlap

STEP_S = 5e-3
CELL = Cell(model="resnet50", workers=4, rate="200mbit")
LATENCY_S = 1e-4
"""Of a message between two hosts."""
ITERATIONS, WARM_UP = 4, 1
PLANS = ("horovod", "pace", "overlap")
TRAINED = Cell(model="resnet50", workers=2, rate="1gbit")
BATCH_SIZE, STEPS = 32, 120
"""Of the training: enough steps to measure, to plan and to settle."""
TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--training", action="store_true", help="train instead of replaying")
    parser.add_argument("--plan", help="work as a rank of a replay, with this plan")
    parser.add_argument("--to", type=Path, help="work as a rank; rank 0 writes here")
    arguments = parser.parse_args()
    if arguments.to is not None:
        if arguments.training:
            work_in_training(arguments.to)
        else:
            work(arguments.plan, arguments.to)
        return
    if arguments.training:
        name, cell, measured = "network_use_training", TRAINED, run(TRAINED, "--training")
    else:
        name, cell = "network_use", CELL
        measured = {plan: run(CELL, "--plan", plan) for plan in PLANS}
    save(
        name,
        {
            "model": cell.model,
            "workers": cell.workers,
            "rate": cell.rate,
            "rate_bytes_per_s": cell.rate_bytes_per_s,
            "step_s": STEP_S,
            "measured": measured,
        },
        module="network_use",
    )


def run(cell: Cell, *options: str) -> Any:
    """Run the ranks on emulated hosts; return what rank 0 found."""
    with run_folder() as folder:
        found = folder / "found.json"
        command = [sys.executable, "-m", "benchmarks.network_use", *options, "--to", str(found)]
        with Testbed(Cluster.of(hosts=cell.workers, rate=cell.rate)) as bed:
            result = bed.run(command, timeout_s=TIMEOUT_S)
        if not found.exists():
            raise SystemExit(f"{' '.join(options)}: the ranks failed: {''.join(result.stderr)}")
        return json.loads(found.read_text())


def work(name: str, to: Path) -> None:
    """Replay one plan; rank 0 writes the iteration, and the bytes sent in every step."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    profile = CELL.profile()
    link = Link(alpha_s=LATENCY_S, beta_s_per_byte=1 / CELL.rate_bytes_per_s, gamma_s_per_byte=0.0)
    network = Network.of_link(link, workers=CELL.workers)
    planner = Overlap() if name == Overlap.NAME else planner_named(name)
    contestant = planned(planner.plan(profile, network))
    sampler = Sampler()
    laps = run_interleaved(
        profile,
        [contestant],
        rounds=1,
        iterations=ITERATIONS,
        warmup=WARM_UP,
        shapes=MODELS[CELL.model].shapes(),
    )
    (lap,) = laps[contestant.name]
    samples = sampler.stop()
    if dist.get_rank() == 0:
        # The iterations measured, without those before.
        steps = round(ITERATIONS * lap.iteration_s / STEP_S)
        found = {"iteration_s": lap.iteration_s, "sent_bytes": sent_in_steps(samples)[-steps:]}
        to.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def work_in_training(to: Path) -> None:
    """Train; rank 0 writes what DDP sent, which goes first, and what ran in the end."""
    config = TrainingConfig.of(
        TRAINED.model,
        "digits",
        overrides={"batch_size": BATCH_SIZE},
        report=str(to.parent / "report"),
        workers=TRAINED.workers,
        steps=STEPS,
        device="cpu",
    )
    sampler, steps = Sampler(), Steps()
    record = train(config, steps)
    samples = sampler.stop()
    if os.environ["RANK"] == "0":
        found = {
            "ddp": _sent_in(samples, steps.window("measuring DDP")),
            "auto": {
                "planner": record.planner,
                "messages": record.messages,
                "reason": record.reason,
                **_sent_in(samples, steps.window("steady")),
            },
        }
        to.write_text(json.dumps(found))


def _sent_in(samples: list[tuple[float, int]], window: tuple[float, float]) -> dict[str, Any]:
    start_s, stop_s = window
    inside = [sample for sample in samples if start_s <= sample[0] <= stop_s]
    return {"iteration_s": (stop_s - start_s) / ITERATIONS, "sent_bytes": sent_in_steps(inside)}


class Steps(TrainingProgress):
    """Notes when the steps of a training were done, in seconds, and in which phase."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[float, str]] = []

    def step(self, now: Snapshot) -> None:
        """Note a step."""
        self._done.append((time.monotonic(), now.phase))

    def window(self, phase: str) -> tuple[float, float]:
        """Return when the last few iterations of a phase began and ended."""
        for last in range(len(self._done) - 1, ITERATIONS - 1, -1):
            inside = self._done[last - ITERATIONS : last + 1]
            if all(name == phase for _, name in inside):
                return inside[0][0], inside[-1][0]
        raise SystemExit(f"the training had no {ITERATIONS} iterations of {phase}")


class Sampler:
    """Reads what this host has sent, at short intervals, until it is stopped."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(STEP_S / 2):
            self._samples.append((time.monotonic(), sent_bytes()))

    def stop(self) -> list[tuple[float, int]]:
        """Return moments in seconds, and the bytes sent until then."""
        self._stopped.set()
        self._thread.join()
        return self._samples


def sent_bytes() -> int:
    """Return the bytes that this host's interface has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == DEVICE:
            return int(counters.split()[8])
    raise SystemExit(f"no interface {DEVICE} here; this must run on an emulated host")


def sent_in_steps(samples: list[tuple[float, int]]) -> list[int]:
    """Return the bytes sent in every step from the first sample on, by linear interpolation."""
    moments = torch.tensor([moment for moment, _ in samples], dtype=torch.float64)
    totals = torch.tensor([total for _, total in samples], dtype=torch.float64)
    steps = torch.arange(float(moments[0]), float(moments[-1]), STEP_S, dtype=torch.float64)
    after = torch.searchsorted(moments, steps).clamp(1, len(samples) - 1)
    share = (steps - moments[after - 1]) / (moments[after] - moments[after - 1])
    at = totals[after - 1] + share * (totals[after] - totals[after - 1])
    found: list[int] = at.diff().round().long().tolist()
    return found


if __name__ == "__main__":
    main()
