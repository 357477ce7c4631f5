"""Seconds an iteration under every plan of ours, beside the peers, on emulated hosts.

Computation is emulated by waiting (:mod:`syncline.lab.replay`); gradients, optimizers' hooks,
processes and the kernel's network are real. In every round each contestant has a turn: it is made
anew, warms up, and its next iterations are timed. Results are kept turn by turn, so a run that is
stopped goes on where it was.

Peers that are not importable are looked for in the environment that ``tools/bench-peers`` makes.
What cannot be run is listed with the reason.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import step_cells
from benchmarks.common import RESULTS
from benchmarks.step_cells import CONTESTANTS, RATES, TARGET_CELLS, WORKERS, Cell
from benchmarks.step_models import MODELS
from benchmarks.step_peers import PEERS
from benchmarks.step_picture import draw
from benchmarks.step_race import Race, spoken
from benchmarks.step_report import print_cell, print_targets
from benchmarks.step_results import Results, load

ROOT = Path(__file__).parents[1]
PEERS_PYTHON = ROOT / "build" / "bench-peers" / "bin" / "python"
ROUNDS, ITERATIONS, WARMUP = 5, 2, 4
"""Under a plan of ours the first two iterations still have DDP's buckets, and what the third leaves
for the fourth is not yet what an iteration leaves for the next."""
QUICK_CELLS = (Cell(model="resnet50", workers=4, rate="1gbit"),)
QUICK_CONTESTANTS = ("ddp", "ddp-5mb", "ddp-100mb", "wfbp", "single", "merge", "pace", "overlap")
console = Console(width=150)


def main() -> None:
    arguments = parsed()
    path = RESULTS / f"{arguments.name}.json"
    results = Results() if arguments.fresh else load(path)
    if arguments.report:
        for measured in results.cells:
            print_cell(console, measured, results.absent)
        finish(results, path)
        return
    cells, contestants = asked(arguments)
    python, absent = interpreter(contestants)
    results = msgspec.structs.replace(results, absent=absent)
    if arguments.retry:
        cleared = (msgspec.structs.replace(measured, failed={}) for measured in results.cells)
        results = msgspec.structs.replace(results, cells=tuple(cleared))
    contestants = [name for name in contestants if name not in absent]
    for name, reason in absent.items():
        console.print(f"{step_cells.TITLES[name]} is absent: {reason}", highlight=False)
    race = Race(arguments, contestants, python, results, path, console)
    todo = [cell for cell in cells if race.turns_left(results.of(cell))]
    total_s = sum(race.expected_s(cell) for cell in todo)
    console.print(
        f"{len(todo)} of {len(cells)} cells to go, {len(contestants)} contestants, "
        f"{arguments.rounds} rounds of {arguments.warmup} + {arguments.iterations} iterations: "
        f"about {spoken(total_s)}",
        highlight=False,
    )
    if arguments.dry_run:
        for cell in todo:
            console.print(f"  {cell}: about {spoken(race.expected_s(cell))}", highlight=False)
        return
    for number, cell in enumerate(todo, start=1):
        if race.is_over():
            console.print("the time is up; the same command goes on from here")
            break
        console.print(
            f"\n[bold]{number}/{len(todo)} {cell}[/], about {spoken(race.expected_s(cell))}",
            highlight=False,
        )
        race.run(cell)
    finish(race.results, path)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--warmup", type=int, default=WARMUP)
    parser.add_argument("--targets", action="store_true", help="only the cells of the targets")
    parser.add_argument("--quick", action="store_true", help="ResNet-50 on 4 hosts; ten minutes")
    parser.add_argument("--clip", action="store_true", help="clip the norm at every step")
    parser.add_argument("--scaler", action="store_true", help="scale the loss, and clip")
    parser.add_argument(
        "--computation",
        type=float,
        metavar="SECONDS",
        help="of one iteration; by default it grows as the links become slower",
    )
    parser.add_argument("--adamw", action="store_true", help="update the parameters, by AdamW")
    parser.add_argument("--minutes", type=float, help="begin no turn after this long")
    parser.add_argument("--retry", action="store_true", help="run what has failed before again")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--dry-run", action="store_true", help="only say how long it would take")
    parser.add_argument("--report", action="store_true", help="only show what was measured")
    parser.add_argument("--name", help="of the results; step_time, or step_time_quick with --quick")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.contestants = ",".join(QUICK_CONTESTANTS)
    name = "step_time_quick" if arguments.quick else "step_time"
    arguments.clip |= arguments.scaler
    arguments.name = arguments.name or (f"{name}_clip" if arguments.clip else name)
    return arguments


def asked(arguments: argparse.Namespace) -> tuple[list[Cell], list[str]]:
    """Return the cells and contestants that the command line asks for."""
    models = chosen("model", arguments.models, tuple(MODELS))
    contestants = chosen("contestant", arguments.contestants, CONTESTANTS)
    workers = [int(count) for count in arguments.workers.split(",")]
    cells = step_cells.table(models, workers, arguments.rates.split(","))
    if arguments.quick:
        cells = list(QUICK_CELLS)
    elif arguments.targets:
        cells = [cell for cell in cells if cell in TARGET_CELLS]
    recipe = {
        "clip": arguments.clip,
        "scaled": arguments.scaler,
        "computation_s": arguments.computation,
        "adamw": arguments.adamw,
    }
    return [replace(cell, **recipe) for cell in cells], contestants


def chosen(what: str, given: str, known: tuple[str, ...]) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"error: unknown {what} {name!r} (known: {', '.join(known)})")
    return names


def interpreter(contestants: list[str]) -> tuple[str, dict[str, str]]:
    """Return the interpreter of the workers, and which contestants it cannot run and why."""
    python = str(PEERS_PYTHON) if PEERS_PYTHON.exists() else sys.executable
    absent = {}
    for name in contestants:
        package = PEERS[name].package if name in PEERS else None
        if package is None:
            continue
        tried = subprocess.run(
            [python, "-c", f"import {package}"], capture_output=True, text=True, check=False
        )
        if tried.returncode:
            why = (tried.stderr.strip().splitlines() or ["the import failed"])[-1]
            absent[name] = f"{why}; 'make bench-peers' sets it up where it can be built"
    return python, absent


def finish(results: Results, path: Path) -> None:
    """Print the targets and draw the picture."""
    console.print()
    print_targets(console, results)
    if any(measured.turns for measured in results.cells):
        picture = path.with_suffix(".png")
        draw(results, picture)
        console.print(f"raw results: {path.relative_to(ROOT)}, picture: {picture.name}")


if __name__ == "__main__":
    main()
