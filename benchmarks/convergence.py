"""Lossy beside dense exchange on real data: what the result costs (gTop-k, Fig. 5 to 7 and 12).

Four workers train each model from the same weights on the same batches: with torch's
DistributedDataParallel alone, and with ``syncline.hooks.gtopk`` at several densities; with
``--wires``, with Syncline's in bfloat16 and int8 from the first step on. Accuracy or perplexity
after every epoch is kept for three seeds. A run that was stopped goes on where it was; what was
measured with another case is thrown away.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import syncline
from benchmarks import raw
from benchmarks.common import RESULTS, machine
from benchmarks.convergence_cases import (
    CASES,
    VARIANTS,
    VARIED,
    VARIED_DENSITY,
    VARIED_EPOCHS,
    WORKERS,
    config_of,
    recipe_of,
    told,
    training_of,
)
from benchmarks.convergence_report import AHEAD, DENSE, Curves, draw, table
from syncline.hooks import GTopKState, Recipe, gtopk
from syncline.lab.training.data.sampling import seed_from
from syncline.lab.training.group import Worker
from syncline.lab.training.replica import Replica, sgd
from syncline.plan.recipe import Rounded

SEEDS = (0, 1, 2)
TIMEOUT = dt.timedelta(hours=1)
"""Long, as a run may stand still while something else is measured."""
PATH = RESULTS / "convergence.json"

Curve = list[dict[str, float]]
"""The figures after every epoch."""


class Job(NamedTuple):
    """A training, and where its curve is kept in the record."""

    place: tuple[str, str]
    """Such as the models' curves, and those of one case."""
    name: str
    case: str
    density: float | None
    """None: dense."""
    ahead: bool
    """Whether gradients are taken where residuals will bring the weights."""
    changes: dict[str, Any]
    """Of the recipe."""
    epochs: int | None
    """None: the case's."""
    wire: Rounded | None = None
    """The type in which every element travels, if not its own."""


def work(rank: int, jobs: Sequence[Job], seed: int, store: str) -> None:
    """Train one job after the other as one of the workers; rank 0 writes results down."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORKERS),
        rank=rank,
        world_size=WORKERS,
        timeout=TIMEOUT,
    )
    for job in jobs:
        start_s = time.perf_counter()
        curve = train(rank, job, seed)
        if rank == 0:
            record = read()
            curves_of(record, job)[str(seed)] = curve
            write(record | {"date": dt.datetime.now(tz=dt.UTC).date().isoformat()})
            took_s = time.perf_counter() - start_s
            print(*job.place, job.name, seed, curve[-1], f"{took_s:.0f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(rank: int, job: Job, seed: int) -> Curve:
    """Train once; return the figures after every epoch."""
    config = config_of(job.case, seed, job.epochs)
    task = training_of(job.case, config)
    torch.manual_seed(seed)
    module = task.build()
    ddp = (
        DistributedDataParallel(module)
        if job.wire is None
        else syncline.DistributedDataParallel(module, compression=job.wire, check=False)
    )
    # From here on the workers draw different numbers, or all would drop out the same units.
    torch.manual_seed(seed_from(seed, rank))
    optimizer = sgd(ddp.module, config)
    if job.density is not None:
        recipe = recipe_of(job.case, config, task.steps_per_epoch, job.density, **job.changes)
        state = GTopKState(ddp, recipe)
        ddp.register_comm_hook(state, gtopk)
        optimizer = without_what_the_recipe_does(optimizer, ddp.module, recipe)
        if job.ahead:
            state.step_ahead(optimizer)
        # The recipe clips.
        hyper = msgspec.structs.replace(config.hyper, clip_norm=None)
        config = msgspec.structs.replace(config, hyper=hyper)
    worker = Worker(rank=rank, workers=WORKERS, device=torch.device("cpu"))
    replica = Replica(
        name=job.name,
        ddp=ddp,
        optimizer=optimizer,
        task=task,
        config=config,
        worker=worker,
    )
    curve = []
    for epoch in range(config.hyper.epochs):
        replica.start_epoch()
        losses: list[float] = []
        for step in task.steps(epoch, worker):
            losses += replica.run_block([step], beside_another=False)
        loss = worker.sum(sum(losses) / len(losses))[0] / WORKERS
        curve.append({"training loss": loss, **replica.evaluate()})
    return curve


def without_what_the_recipe_does(optimizer: SGD, module: nn.Module, recipe: Recipe) -> SGD:
    """Return an optimizer that leaves momentum to the recipe, but for what is exchanged whole.

    The weight decay went through the momentum too, and was as many times as strong.
    """
    if not recipe.momentum:
        return optimizer
    whole, sparse = [], []
    for name, parameter in module.named_parameters():
        (whole if recipe.is_dense(name, parameter.numel()) else sparse).append(parameter)
    usual = optimizer.defaults
    decay = usual["weight_decay"] / (1 - usual["momentum"])
    groups = [{"params": sparse, "momentum": 0.0, "weight_decay": decay}, {"params": whole}]
    return SGD([group for group in groups if group["params"]], **usual)


def name_of(density: float | None, *, ahead: bool) -> str:
    name = DENSE if density is None else f"{density:g}"
    return name + AHEAD * ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--variants", action="store_true", help="train with other recipes instead")
    parser.add_argument("--wires", action="store_true", help="train in 16 and 8 bits instead")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no seed after this long")
    parser.add_argument("--report", action="store_true", help="only show what was measured")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    jobs = variants() if arguments.variants else list(itertools.chain(*map(jobs_of, models)))
    if arguments.wires:
        jobs = list(itertools.chain(*map(in_wires, models)))
    seeds = [] if arguments.report else [int(seed) for seed in arguments.seeds.split(",")]
    measure(jobs, seeds, until_s=time.monotonic() + 60 * arguments.minutes)
    record = read()
    Console().print(table(record["models"]))
    Console().print(table(record["wires"]))
    Console().print(table(record["variants"]))
    draw(record["models"], RESULTS / "convergence.png")


def measure(jobs: Sequence[Job], seeds: Sequence[int], *, until_s: float) -> None:
    """Train what is missing, each seed of a model by processes of its own."""
    write(prepared(read()))
    for seed in seeds:
        for _, group in itertools.groupby(jobs, lambda job: job.place):
            record = read()
            missing = [job for job in group if str(seed) not in curves_of(record, job)]
            if not missing or time.monotonic() > until_s:
                continue
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(work, (missing, seed, str(Path(folder) / "store")), nprocs=WORKERS)


def jobs_of(case: str) -> list[Job]:
    """Return a case's trainings."""
    plain = [
        Job(("models", case), name_of(density, ahead=False), case, density, False, {}, None)
        for density in (None, *CASES[case].densities)
    ]
    # The optimizer's momentum: where it is stepped ahead by, it needs no correction.
    ahead = [
        Job(("models", case), name_of(d, ahead=True), case, d, True, {"momentum": 0.0}, None)
        for d in CASES[case].ahead
    ]
    return plain + ahead


def in_wires(case: str) -> list[Job]:
    """Return a case's trainings with every element sent."""
    names: dict[str, Rounded | None] = {DENSE: None, "bfloat16": "bfloat16", "int8": "int8"}
    return [
        Job(("wires", case), name, case, None, False, {}, None, wire)
        for name, wire in names.items()
    ]


def variants() -> list[Job]:
    """Return the short trainings with other recipes."""
    return [
        Job(
            ("variants", VARIED),
            name,
            VARIED,
            None if changes is None else VARIED_DENSITY,
            False,
            changes or {},
            VARIED_EPOCHS,
        )
        for name, changes in VARIANTS.items()
    ]


def curves_of(record: dict[str, Any], job: Job) -> Curves:
    """Return where the curves of a job are kept."""
    part, model = job.place
    found: Curves = record[part][model][job.name]
    return found


def prepared(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record that holds nothing of other cases than the present ones."""
    cases = {model: json.loads(json.dumps(told(model))) for model in CASES}
    made: dict[str, Any] = {"models": {}, "wires": {}, "variants": {}}
    for job in itertools.chain(*map(jobs_of, CASES), *map(in_wires, CASES), variants()):
        part, model = job.place
        same = record["cases"].get(model) == cases[model]
        kept = record.get(part, {}).get(model, {}) if same else {}
        made[part].setdefault(model, {})[job.name] = kept.get(job.name, {})
    return record | {"cases": cases} | made


def read() -> dict[str, Any]:
    """Return what was measured before, or an empty record."""
    if raw.exists(PATH):
        found: dict[str, Any] = raw.read(PATH)
        return found
    return {
        "benchmark": "convergence",
        "date": "",
        "command": "python -m benchmarks.convergence",
        "machine": machine(),
        "workers": WORKERS,
        "algorithm": Recipe(density=1.0).algorithm,
        "cases": {},
        "models": {},
        "wires": {},
        "variants": {},
    }


def write(record: dict[str, Any]) -> None:
    """Write a record to its file, whole or not at all."""
    raw.write(PATH, record)


if __name__ == "__main__":
    main()
