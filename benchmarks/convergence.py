"""gTop-k beside dense exchange on real data: what the result costs (gTop-k, Fig. 5 to 7 and 12).

Four workers train each model from the same weights on the same batches: with torch's
DistributedDataParallel alone, and with ``syncline.hooks.gtopk`` at several densities. Accuracy or
perplexity after every epoch is kept for three seeds. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import RESULTS, machine
from benchmarks.convergence_picture import draw
from benchmarks.convergence_table import DENSE, table
from syncline.hooks import GTopKState, Recipe, gtopk
from syncline.model.recipe import PAPER_WARMUP
from syncline.training.config import TrainingConfig
from syncline.training.data.seeds import seed_from
from syncline.training.group import Worker
from syncline.training.replica import Replica
from syncline.training.task import task_of
from syncline.training.wrap import sgd

WORKERS = 4
SEEDS = (0, 1, 2)
TIMEOUT = dt.timedelta(hours=1)
"""Long, as a run may stand still while something else is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on data, and what is varied."""

    data: str
    densities: tuple[float, ...]
    hyper: dict[str, float] = field(default_factory=dict)
    warmup_epochs: float = 1.0
    """Of each density of the warm-up."""


CASES = {
    "resnet20": Case(data="digits", densities=(0.01, 0.001), hyper={"epochs": 40}),
    "lstm": Case(
        data="text",
        densities=(0.01, 0.005, 0.001),
        hyper={"epochs": 4, "batch_size": 10, "learning_rate": 2.0},
        warmup_epochs=0.2,
    ),
    "transformer": Case(
        data="text",
        densities=(0.01, 0.001),
        hyper={"epochs": 2, "batch_size": 4, "learning_rate": 0.1},
        warmup_epochs=0.1,
    ),
    "vgg16": Case(
        data="digits",
        densities=(0.01, 0.001),
        hyper={"epochs": 5, "batch_size": 4, "learning_rate": 0.02, "warmup_epochs": 0.5},
        warmup_epochs=0.25,
    ),
}
"""Trainings that end in minutes: fewer epochs of smaller batches than the papers'."""


def recipe_of(case: Case, config: TrainingConfig, steps_per_epoch: int, density: float) -> Recipe:
    """Return how a density is trained: the paper's warm-up, then the density itself."""
    return Recipe(
        density=density,
        warmup=PAPER_WARMUP,
        warmup_steps=max(round(case.warmup_epochs * steps_per_epoch), 1),
        momentum=config.hyper.momentum,
        clip_norm=config.hyper.clip_norm,
        unit="model",
    )


def train(rank: int, model: str, density: float | None, seed: int, folder: str) -> None:
    """Train once as one of the workers; rank 0 leaves the curve in ``folder``."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS, timeout=TIMEOUT)
    case = CASES[model]
    config = TrainingConfig.of(
        model, case.data, workers=WORKERS, seed=seed, device="cpu", overrides=case.hyper
    )
    task = task_of(config)
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.build())
    # From here on the workers draw different numbers, or all would drop out the same units.
    torch.manual_seed(seed_from(seed, rank))
    if density is not None:
        recipe = recipe_of(case, config, task.steps_per_epoch, density)
        ddp.register_comm_hook(GTopKState(ddp, recipe), gtopk)
        # The recipe's momentum and clipping take the place of the optimizer's.
        hyper = msgspec.structs.replace(config.hyper, momentum=0.0, clip_norm=None)
        config = msgspec.structs.replace(config, hyper=hyper)
    worker = Worker(rank=rank, workers=WORKERS, device=torch.device("cpu"))
    replica = Replica(
        name=DENSE if density is None else f"gTop-k {density:g}",
        ddp=ddp,
        optimizer=sgd(ddp.module, config),
        task=task,
        config=config,
        worker=worker,
    )
    curve = []
    for epoch in range(config.hyper.epochs):
        replica.start_epoch()
        losses: list[float] = []
        for step in task.steps(epoch, worker):
            losses += replica.run_block([step], after_twin=False)
        loss = worker.sum(sum(losses) / len(losses))[0] / WORKERS
        curve.append({"training loss": loss, **replica.evaluate()})
    if rank == 0:
        (Path(folder) / "curve.json").write_text(json.dumps(curve))
    dist.barrier()
    dist.destroy_process_group()


def name_of(density: float | None) -> str:
    return DENSE if density is None else f"{density:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after this long")
    parser.add_argument("--report", action="store_true", help="only show what was measured")
    arguments = parser.parse_args()
    path = RESULTS / "convergence.json"
    record = read(path)
    end_s = time.monotonic() + 60 * arguments.minutes
    models = arguments.models.split(",")
    for seed in map(int, arguments.seeds.split(",")):
        for model in models:
            for density in (None, *CASES[model].densities):
                curves = record["models"].setdefault(model, {}).setdefault(name_of(density), {})
                if arguments.report or str(seed) in curves or time.monotonic() > end_s:
                    continue
                start_s = time.perf_counter()
                curves[str(seed)] = run(model, density, seed)
                took_s = time.perf_counter() - start_s
                print(model, name_of(density), seed, curves[str(seed)][-1], f"{took_s:.0f} s")
                path.write_text(json.dumps(record, indent=1) + "\n")
    Console().print(table(record["models"]))
    draw(record["models"], RESULTS / "convergence.png")


def run(model: str, density: float | None, seed: int) -> list[dict[str, float]]:
    """Train once on processes of its own; return the figures after every epoch."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (model, density, seed, folder), nprocs=WORKERS)
        curve: list[dict[str, float]] = json.loads((Path(folder) / "curve.json").read_text())
    return curve


def read(path: Path) -> dict[str, Any]:
    """Return what was measured before, or an empty record."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {
        "benchmark": "convergence",
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python -m benchmarks.convergence",
        "machine": machine(),
        "workers": WORKERS,
        "algorithm": Recipe(density=1.0).algorithm,
        "cases": {
            name: {
                "data": case.data,
                "warmup_epochs_each": case.warmup_epochs,
                "hyper": msgspec.to_builtins(
                    TrainingConfig.of(name, case.data, overrides=dict(case.hyper)).hyper
                ),
            }
            for name, case in CASES.items()
        },
        "models": {},
    }


if __name__ == "__main__":
    main()
