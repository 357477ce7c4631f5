"""After how many iterations a plan runs, and what measuring has cost until then.

``python -m benchmarks.time_to_gain [--rounds 5] [--models resnet50 bert-base] [--hosts 2 4]``

Each start is a training of its own on emulated hosts: the first one measures and plans; the second
remembers the plan; the third is given the plan, unchecked. What a start has lost is how much longer
its iterations took than those of the third, in iterations of the plan. Computing is emulated by
waiting. Writes ``results/time_to_gain.json``.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import median, save
from benchmarks.step_cells import NOMINAL_RATE, Cell
from benchmarks.step_models import MODELS
from syncline.lab.replay.interleaved import train_step
from syncline.lab.replay.model import Replayed
from syncline.lab.testbed import Cluster, Testbed
from syncline.train.ddp import DistributedDataParallel, planned_training

MARK = "time_to_gain: "
LAST = 8
"""Iterations at the end that say how long one takes under the plan."""
MOST = 300
STARTS = ("first", "second", "given")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet50", "bert-base"], choices=MODELS)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rate", default=NOMINAL_RATE)
    parser.add_argument("--clip", nargs="+", type=int, default=[0, 1], choices=[0, 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="time_to_gain", help="of the file of results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker))
        return
    cells = [
        {"model": model, "workers": hosts, "rate": arguments.rate, "clip": bool(clip)}
        for model, hosts, clip in itertools.product(
            arguments.models, arguments.hosts, arguments.clip
        )
    ]
    found: list[dict[str, Any]] = [{"cell": cell, "runs": []} for cell in cells]
    print(
        "model        hosts clip  start   plan runs from  at rest from  lost  predicted  measured"
    )
    for _ in range(arguments.rounds):
        for entry in found:
            run = start_all(entry["cell"])
            entry["runs"].append(run)
            for start, what in run.items():
                print(line(entry["cell"], start, what, run), flush=True)
            save(arguments.name, {"cells": found}, module="time_to_gain")


def line(cell: dict[str, Any], start: str, what: dict[str, Any], run: dict[str, Any]) -> str:
    predicted_s = what["predicted_s"]
    return (
        f"{cell['model']:12} {cell['workers']:5} {cell['clip']!s:5} {start:7} "
        f"{what['plan_from'] or '-'!s:>9} {what['rest_from'] or '-'!s:>10} "
        f"{lost(what, run['given']):5.1f} "
        f"{predicted_s or float('nan'):8.3f} s {what['iteration_s']:7.3f} s  {what['planner']}"
    )


def lost(what: dict[str, Any], given: dict[str, Any]) -> float:
    """Return how much longer a start took than the one with the plan given, in its iterations."""
    length = min(len(what["steps_s"]), len(given["steps_s"]))
    more_s = sum(what["steps_s"][:length]) - sum(given["steps_s"][:length])
    # What one start took beyond that counts, too.
    more_s += sum(step - given["iteration_s"] for step in what["steps_s"][length:])
    return more_s / given["iteration_s"]


def start_all(cell: dict[str, Any]) -> dict[str, Any]:
    """Train on the hosts of a cell; return what each start has found."""
    found: dict[str, Any] = {}

    def take(rank: int, error: bool, said: bytes) -> None:
        text = said.decode(errors="replace")
        if text.startswith(MARK):
            what = json.loads(text.removeprefix(MARK))
            found[what.pop("start")] = what
        elif error or os.environ.get("VERBOSE"):
            print(f"rank {rank}: {text.rstrip()}", file=sys.stderr)

    with tempfile.TemporaryDirectory() as cache:
        job = json.dumps({"cell": cell, "cache": cache})
        with Testbed(Cluster.of(hosts=cell["workers"], rate=cell["rate"])) as bed:
            result = bed.run(
                [sys.executable, "-m", "benchmarks.time_to_gain", "--worker", job], output=take
            )
    if result.exit_code:
        raise SystemExit(f"the training of {cell} ended with exit code {result.exit_code}")
    return found


def work(job: dict[str, Any]) -> None:
    cell = Cell(**job["cell"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    remembers = "cache" in inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"cache": job["cache"]} if remembers else {}
    plan = None
    for start in STARTS:
        if start == "second" and not remembers:
            continue
        if start == "given":
            given = {"plan": plan, "check": False} if plan is not None else {"planner": "ddp"}
            options = given | ({"cache": False} if remembers else {})
        what, plan = train(cell, options)
        if dist.get_rank() == 0:
            print(MARK + json.dumps({"start": start, **what}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(cell: Cell, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Train until measuring is over, and some iterations more."""
    profile = cell.profile()
    module = Replayed(profile, rank=dist.get_rank(), shapes=MODELS[cell.model].shapes())
    optimizer = module.optimizer()
    dist.barrier()
    model = DistributedDataParallel(module, init_sync=False, **options)
    model.overlap(optimizer)
    phases: list[str] = []
    plans: list[Any] = []
    ends_s = [time.perf_counter()]
    rest = 0
    while rest < LAST + 3:
        plans.append(model.plan)
        phases.append(model.phase)
        train_step(model, optimizer, norm=profile.norm)
        ends_s.append(time.perf_counter())
        rest = rest + 1 if not model.measuring else 0
        assert len(phases) < MOST, phases
    model.synchronize()
    steps_s = [after - before for before, after in itertools.pairwise(ends_s)]
    run = model.run_record()
    final = model.plan
    plan_from = None
    if final is not None:
        plan_from = (
            len(plans)
            - sum(1 for _ in itertools.takewhile(lambda plan: plan == final, plans[::-1]))
            + 1
        )
    for_a_while = [(p, len(list(several))) for p, several in itertools.groupby(phases)]
    what = {
        "plan_from": plan_from,
        "rest_from": len(phases) - rest + 1,
        "steps_s": steps_s,
        "iteration_s": median(steps_s[-LAST:]),
        "predicted_s": run.predicted_s,
        "baseline_s": run.baseline.iteration_s if run.baseline else None,
        "planner": run.planner,
        "decision": run.decision,
        "phases": for_a_while,
        "overhead_iterations": run.overhead_iterations,
    }
    planned_training(model).reducer.close()
    return what, final


if __name__ == "__main__":
    main()
    sys.stdout.flush()
