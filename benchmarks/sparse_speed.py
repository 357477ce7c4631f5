"""gTop-k's models on emulated 1 Gbit/s hosts: dense DDP, Top-k, gTop-k by tree and by butterfly.

Computation is emulated by waiting for the paper's iteration times (Table VI); gradients, selection,
processes and the kernel's network are real, and the hook is ``syncline.hooks.gtopk`` on torch's own
class. Contestants take turns. Beside iterations, the exchange of a whole model's entries is timed
alone. Results are kept turn by turn, so a run that is stopped goes on where it was.

All hosts share this machine's cores, which real ones do not. So exchanges are also timed on links
that are slower by as many times as there are hosts for each core, and the times divided by that:
to everything that is timed, each host then has a core of its own.

``--rounds`` is how often each has its turn; ``--minutes`` begins no cell after this long.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from benchmarks import raw
from benchmarks.common import RESULTS, machine, median, spread
from benchmarks.sparse_models import DENSITY, PAPER
from benchmarks.sparse_worker import DENSE, MARK
from benchmarks.step_jobs import free_bytes
from syncline.lab.testbed import Cluster, Testbed

mpl.use("Agg")
from matplotlib import pyplot as plt

NAME = "sparse_speed"
RATE = "1gbit"
SPARSE = ("top-k", "gtop-k", "gtop-k-butterfly")
CONTESTANTS = (DENSE, *SPARSE)
TITLES = {
    DENSE: "dense DDP",
    "top-k": "Top-k",
    "gtop-k": "gTop-k tree",
    "gtop-k-butterfly": "gTop-k butterfly",
}
CELLS = (
    ("resnet20", 4),
    ("resnet20", 8),
    ("resnet20", 16),
    ("alexnet", 4),
    ("alexnet", 8),
    ("resnet50", 4),
    ("resnet50", 8),
    ("vgg16", 4),
    ("vgg16", 8),
)
OWN_CORES = (
    ("alexnet", 4),
    ("alexnet", 8),
    ("alexnet", 16),
    ("vgg16", 4),
    ("vgg16", 8),
    ("vgg16", 16),
)
COLOURS = {"compute": "#999999", "compress": "#2b62a8", "communicate": "#b8421a"}
START_S = 120.0
WORKER_BYTES, COPIES = 300_000_000, 3
"""Of a process: torch, and the gradients: as residuals, and in buckets that DDP makes anew once."""
KEPT_FREE_BYTES = 1_000_000_000
ROOT = Path(__file__).parents[1]
console = Console(width=130, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", help="such as alexnet@8,vgg16@8; all by default")
    parser.add_argument("--own-cores", help="exchanges as on hosts with a core each; alike")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=5, help="exchanges in a turn")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--report", action="store_true", help="only show what was measured")
    arguments = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    results = raw.read(path) if raw.exists(path) else {"benchmark": NAME, "cells": []}
    until_s = time.monotonic() + 60 * arguments.minutes
    if not arguments.report:
        for model, workers, own_cores in cells_of(arguments):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            run_cell(results, path, cell_of(results, model, workers, own_cores), arguments, left_s)
    report(results)
    draw(results)


def cells_of(arguments: argparse.Namespace) -> Iterator[tuple[str, int, bool]]:
    """Yield models, numbers of hosts, and whether each is to have a core of its own."""
    asked = arguments.cells is not None or arguments.own_cores is not None
    for text, standard, own_cores in (
        (arguments.own_cores, OWN_CORES, True),
        (arguments.cells, CELLS, False),
    ):
        if text is None:
            yield from ((model, workers, own_cores) for model, workers in standard if not asked)
            continue
        for model, _, workers in (each.partition("@") for each in text.split(",")):
            yield model, int(workers), own_cores


def cell_of(results: dict[str, Any], model: str, workers: int, own_cores: bool) -> dict[str, Any]:
    slowed = max(workers / len(os.sched_getaffinity(0)), 1) if own_cores else 1
    for cell in results["cells"]:
        if (cell["model"], cell["workers"], cell.get("slowed", 1)) == (model, workers, slowed):
            found: dict[str, Any] = cell
            return found
    cell = {"model": model, "workers": workers, "rate": RATE, "density": DENSITY, "turns": []}
    if slowed > 1:
        cell |= {"slowed": slowed, "rate": f"{1000 / slowed:g}mbit"}
    results["cells"].append(cell)
    return cell


def run_cell(
    results: dict[str, Any],
    path: Path,
    cell: dict[str, Any],
    arguments: argparse.Namespace,
    seconds: float,
) -> None:
    """Take the turns that a cell lacks."""
    model, workers = cell["model"], cell["workers"]
    kinds: list[tuple[str, tuple[str, ...]]] = [("exchange", SPARSE)]
    if "slowed" not in cell:
        kinds.append(("training", CONTESTANTS))
    done = {(turn["kind"], turn["contestant"], turn["round"]) for turn in cell["turns"]}
    turns = [
        (kind, name, number)
        for number in range(arguments.rounds)
        for kind, names in kinds
        for name in (*names[number % len(names) :], *names[: number % len(names)])
        if (kind, name, number) not in done
    ]
    if not turns:
        return
    copies = 0 if "slowed" in cell else COPIES
    need_bytes = (
        workers * (WORKER_BYTES + copies * 4 * PAPER[model].model.elements) + KEPT_FREE_BYTES
    )
    if free_bytes() < need_bytes:
        cell["left_out"] = f"needs {need_bytes / 1e9:.1f} GB, {free_bytes() / 1e9:.1f} GB were free"
        keep(results, path)
        console.print(f"{model} on {workers} hosts left out: {cell['left_out']}")
        return
    cell.pop("left_out", None)
    console.print(f"{model} on {workers} hosts at {cell['rate']}: {len(turns)} turns")
    said: list[str] = []

    def take(rank: int, error: bool, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if error or not text.startswith(MARK):
            said.append(f"rank {rank}: {text}")
            return
        turn = json.loads(text.removeprefix(MARK))
        cell["turns"].append(turn)
        cell["date"] = dt.datetime.now(tz=dt.UTC).date().isoformat()
        keep(results, path)
        times_s = turn.get("iterations_s") or turn["exchanges_s"]
        console.print(
            f"  round {turn['round'] + 1}  {turn['kind']:9} {TITLES[turn['contestant']]:18} "
            f"{median(times_s):.4f} s"
        )

    # Each round has processes of its own: what rounds leave behind in one adds up, and with VGG-16
    # eight hosts had no room for the fifth.
    until_s = time.monotonic() + seconds
    for _, of_round in itertools.groupby(turns, lambda turn: turn[2]):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            break
        job = {
            "model": model,
            "turns": list(of_round),
            "seconds": left_s,
            "iterations": arguments.iterations,
            "repetitions": arguments.repetitions,
        }
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "job.json")
            file.write_text(json.dumps(job))
            with Testbed(Cluster.of(hosts=workers, rate=cell["rate"])) as bed:
                result = bed.run(
                    [sys.executable, "-m", "benchmarks.sparse_worker", str(file)],
                    environment={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
                    timeout_s=START_S + 1.5 * left_s,
                    output=take,
                )
        if result.exit_code:
            cell["failed"] = said[-1] if said else f"exit code {result.exit_code}"
            keep(results, path)
            console.print("\n".join(said[-12:]), markup=False)
            raise SystemExit(f"error: {model} on {workers} hosts failed")
    cell.pop("failed", None)


def keep(results: dict[str, Any], path: Path) -> None:
    results["machine"] = machine()
    results["command"] = f"python -m benchmarks.{NAME} {' '.join(sys.argv[1:])}".strip()
    raw.write(path, results)


# --- what came out ---


def seconds_of(cell: dict[str, Any], kind: str, name: str) -> list[float]:
    """Return the median time of each turn."""
    key = {"training": "iterations_s", "exchange": "exchanges_s"}[kind]
    return [
        median(turn[key]) / cell.get("slowed", 1)
        for turn in cell["turns"]
        if turn["kind"] == kind and turn["contestant"] == name
    ]


def part_s(cell: dict[str, Any], name: str, part: str) -> float:
    turns = [t for t in cell["turns"] if t["kind"] == "training" and t["contestant"] == name]
    return median([turn[f"{part}_s"] for turn in turns])


def complete(cell: dict[str, Any]) -> bool:
    return all(seconds_of(cell, "training", name) for name in CONTESTANTS)


def report(results: dict[str, Any]) -> None:
    report_own_cores([cell for cell in results["cells"] if "slowed" in cell and cell["turns"]])
    for cell in results["cells"]:
        if not complete(cell):
            continue
        published = PAPER[cell["model"]]
        rounds = len(seconds_of(cell, "training", DENSE))
        table = Table(
            title=f"{published.model.title}, {cell['workers']} hosts, {cell['rate']}, "
            f"{published.iteration_s} s computing, {rounds} rounds: seconds, median (least .. most)"
        )
        for column in ("", "iteration", "over dense", "compress", "communicate", "exchange alone"):
            table.add_column(column)
        dense_s = median(seconds_of(cell, "training", DENSE))
        for name in CONTESTANTS:
            mine = seconds_of(cell, "training", name)
            alone = seconds_of(cell, "exchange", name) if name != DENSE else []
            table.add_row(
                TITLES[name],
                spread(mine),
                f"{dense_s / median(mine):.2f}",
                "" if name == DENSE else f"{part_s(cell, name, 'compress'):.4f}",
                "" if name == DENSE else f"{part_s(cell, name, 'communicate'):.4f}",
                spread(alone) if alone else "",
            )
        console.print(table)
        for text, found, least in verdicts(cell):
            console.print(
                f"{'met   ' if found >= least else 'MISSED'} {text}: {found:.2f} ({least})"
            )


def report_own_cores(cells: list[dict[str, Any]]) -> None:
    table = Table(
        title="Exchange alone, a core a host, 1 Gbit/s: ms, median (least .. most) of rounds"
    )
    for column in ("", "hosts", "rounds", *(TITLES[name] for name in SPARSE), "tree / butterfly"):
        table.add_column(column)
    for cell in cells:
        times_s = {name: seconds_of(cell, "exchange", name) for name in SPARSE}
        times_ms = {name: [1e3 * each for each in mine] for name, mine in times_s.items()}
        ratio = median(times_s["gtop-k"]) / median(times_s["gtop-k-butterfly"])
        table.add_row(
            PAPER[cell["model"]].model.title,
            str(cell["workers"]),
            str(len(times_s["gtop-k"])),
            *(spread(times_ms[name]) for name in SPARSE),
            f"{ratio:.2f}",
        )
    if cells:
        console.print(table)


def verdicts(cell: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return what the targets say about a cell: what, how much, and at least how much."""
    best = {n: median(seconds_of(cell, "training", n)) for n in CONTESTANTS}
    alone = {n: median(seconds_of(cell, "exchange", n)) for n in SPARSE}
    said = [
        ("butterfly over the tree, exchange", alone["gtop-k"] / alone["gtop-k-butterfly"], 1.5),
        ("butterfly over Top-k, iteration", best["top-k"] / best["gtop-k-butterfly"], 1.0),
    ]
    if cell["model"] in ("vgg16", "alexnet") and cell["workers"] == 8:
        said.append(("gTop-k over dense", best[DENSE] / best["gtop-k-butterfly"], 5.0))
    return said


def draw(results: dict[str, Any]) -> None:
    """Draw the split of every cell, as the paper's Fig. 11, and the exchange alone."""
    cells = [cell for cell in results["cells"] if complete(cell)]
    if not cells:
        return
    columns = min(len(cells), 3)
    rows = -(-len(cells) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 2.5 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(cells) :]:
        axis.set_axis_off()
    for axis, cell in zip(axes.flat, cells, strict=False):
        published = PAPER[cell["model"]]
        for row, name in enumerate(CONTESTANTS):
            whole_s = median(seconds_of(cell, "training", name))
            compute_s = min(published.iteration_s, whole_s)
            compress_s = 0.0 if name == DENSE else part_s(cell, name, "compress")
            # What of compressing is hidden under computing cannot be seen; so the rest is shown.
            compress_s = min(compress_s, whole_s - compute_s)
            left = 0.0
            for what, width in (
                ("compute", compute_s),
                ("compress", compress_s),
                ("communicate", whole_s - compute_s - compress_s),
            ):
                axis.barh(row, width, left=left, color=COLOURS[what], height=0.7)
                left += width
            dense_s = median(seconds_of(cell, "training", DENSE))
            axis.text(
                left, row, f" {whole_s:.3g} s, {dense_s / whole_s:.2g}x", va="center", fontsize=7
            )
        axis.set_yticks(range(len(CONTESTANTS)), [TITLES[n] for n in CONTESTANTS], fontsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.35)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_title(f"{published.model.title}, {cell['workers']} hosts", fontsize=9)
    handles = [mpl.patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(
        f"Seconds an iteration at {RATE.replace('gbit', ' Gbit/s')}, density {DENSITY}: "
        "what is not hidden under computing",
        fontsize=10,
    )
    figure.savefig(RESULTS / f"{NAME}.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
