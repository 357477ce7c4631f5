"""gTop-k beside dense exchange on real data: what the result costs (gTop-k, Fig. 5 to 7 and 12).

Four workers train each model from the same weights on the same batches: with torch's
DistributedDataParallel alone, and with ``syncline.hooks.gtopk`` at several densities. Accuracy or
perplexity after every epoch is kept for three seeds. A run that was stopped goes on where it was;
what was measured with another case is thrown away.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import RESULTS, machine
from benchmarks.convergence_cases import (
    CASES,
    WORKERS,
    config_of,
    recipe_of,
    told,
    training_of,
)
from benchmarks.convergence_picture import draw
from benchmarks.convergence_table import DENSE, table
from syncline.hooks import GTopKState, Recipe, gtopk
from syncline.training.data.seeds import seed_from
from syncline.training.group import Worker
from syncline.training.replica import Replica
from syncline.training.wrap import sgd

SEEDS = (0, 1, 2)
TIMEOUT = dt.timedelta(hours=1)
"""Long, as a run may stand still while something else is measured."""
PATH = RESULTS / "convergence.json"

Curve = list[dict[str, float]]
"""The figures after every epoch."""


def work(rank: int, model: str, densities: Sequence[float | None], seed: int, store: str) -> None:
    """Train with one exchange after the other as one of the workers; rank 0 writes results down."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORKERS),
        rank=rank,
        world_size=WORKERS,
        timeout=TIMEOUT,
    )
    for density in densities:
        start_s = time.perf_counter()
        curve = train(rank, model, density, seed)
        if rank == 0:
            record = json.loads(PATH.read_text())
            record["models"][model].setdefault(name_of(density), {})[str(seed)] = curve
            write(record | {"date": dt.datetime.now(tz=dt.UTC).date().isoformat()})
            took_s = time.perf_counter() - start_s
            print(model, name_of(density), seed, curve[-1], f"{took_s:.0f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(rank: int, model: str, density: float | None, seed: int) -> Curve:
    """Train once, dense where there is no density; return the figures after every epoch."""
    config = config_of(model, seed)
    task = training_of(model, config)
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.build())
    # From here on the workers draw different numbers, or all would drop out the same units.
    torch.manual_seed(seed_from(seed, rank))
    if density is not None:
        recipe = recipe_of(model, config, task.steps_per_epoch, density)
        ddp.register_comm_hook(GTopKState(ddp, recipe), gtopk)
        # The recipe's momentum and clipping take the place of the optimizer's. Its weight decay
        # went through the momentum too, and was as many times as strong.
        hyper = msgspec.structs.replace(
            config.hyper,
            momentum=0.0,
            clip_norm=None,
            weight_decay=config.hyper.weight_decay / (1 - config.hyper.momentum),
        )
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
    return curve


def name_of(density: float | None) -> str:
    return DENSE if density is None else f"{density:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no seed after this long")
    parser.add_argument("--report", action="store_true", help="only show what was measured")
    arguments = parser.parse_args()
    if arguments.report:
        write(prepared(read()))
    else:
        measure(
            arguments.models.split(","),
            [int(seed) for seed in arguments.seeds.split(",")],
            until_s=time.monotonic() + 60 * arguments.minutes,
        )
    measured = json.loads(PATH.read_text())["models"]
    Console().print(table(measured))
    draw(measured, RESULTS / "convergence.png")


def measure(models: Sequence[str], seeds: Sequence[int], *, until_s: float) -> None:
    """Train what is missing, each seed of a model by processes of its own."""
    write(prepared(read()))
    for model in models:
        for seed in seeds:
            found = read()["models"][model]
            missing = [
                density
                for density in (None, *CASES[model].densities)
                if str(seed) not in found.get(name_of(density), {})
            ]
            if not missing or time.monotonic() > until_s:
                continue
            with tempfile.TemporaryDirectory() as folder:
                store = str(Path(folder) / "store")
                mp.spawn(work, (model, missing, seed, store), nprocs=WORKERS)


def prepared(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record that holds nothing of other cases than the present ones."""
    cases = {model: json.loads(json.dumps(told(model))) for model in CASES}
    models = {}
    for model, case in CASES.items():
        same = record["cases"].get(model) == cases[model]
        kept = record["models"].get(model, {}) if same else {}
        names = [name_of(density) for density in (None, *case.densities)]
        models[model] = {name: kept.get(name, {}) for name in names}
    return record | {"cases": cases, "models": models}


def read() -> dict[str, Any]:
    """Return what was measured before, or an empty record."""
    if PATH.exists():
        found: dict[str, Any] = json.loads(PATH.read_text())
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
    }


def write(record: dict[str, Any]) -> None:
    """Write a record to its file, whole or not at all."""
    part = PATH.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(PATH)


if __name__ == "__main__":
    main()
