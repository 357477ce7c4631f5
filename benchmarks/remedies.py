"""What ``syncline advise`` predicts for public scripts, beside what its remedies then do.

``--manifest`` names a JSON file that lists scripts: ``name``, ``cwd``, ``command`` (the script and
its arguments), ``environment``, ``repository`` and ``commit``, and optionally ``accumulated``: more
arguments, with which it takes an optimizer step after 4 batches. For each script and rate, in
turns: ``advise`` observes the unmodified script on emulated hosts, and it runs under DDP and under
each remedy. Every advice is compared with the medians over all rounds. Results are kept turn by
turn, so the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import raw
from benchmarks.common import RESULTS, machine, median
from benchmarks.step_results import today
from syncline.lab.testbed import Cluster, Testbed
from syncline.plan.advice import Advice

ROOT = Path(__file__).parents[1]
RATES = ("100mbit", "250mbit", "1gbit")
WARM_UP, STEPS = 8, 16
SETTLED = 140
"""Iterations after which Syncline has decided, without a plan of an earlier start."""
DEADLINE_S = 600.0
FASTER = "10gbit"
ACCUMULATED = 4
"""Iterations are timed by so many, with accumulation or not."""
CERTAIN = 0.02
"""Two gains that differ by less are in no order."""
RUNS = {
    "overlap": (),
    "16-bit gradients": ("--compression", "bf16"),
    "8-bit gradients": ("--compression", "int8"),
    "sparse": ("--compression", "gtopk", "--density", "0.001"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--scripts", help="names, with commas; by default all")
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the scripts")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no turn after")
    parser.add_argument("--report", action="store_true", help="only show what was measured")
    arguments = parser.parse_args()
    path = RESULTS / "remedies.json"
    cells: dict[str, Any] = raw.read(path)["cells"] if raw.exists(path) else {}
    scripts = {script["name"]: script for script in json.loads(arguments.manifest.read_text())}
    names = arguments.scripts.split(",") if arguments.scripts else list(scripts)
    until_s = time.monotonic() + 60 * arguments.minutes

    def keep() -> None:
        record = {
            "benchmark": "remedies",
            "date": today(),
            "command": "python -m benchmarks.remedies --manifest scripts.json",
            "hosts": arguments.hosts,
            "machine": machine(),
            "cells": cells,
        }
        raw.write(path, record)

    if not arguments.report:
        for name, rate in itertools.product(names, arguments.rates.split(",")):
            bench = Bench(scripts[name], rate, arguments.hosts, arguments.python)
            cell = cells.setdefault(f"{name}, {rate}", {})
            for _ in bench.turns(cell, arguments.rounds):
                keep()
                if time.monotonic() > until_s:
                    raise SystemExit("the time is up; the same command goes on from here")
    report(cells)


class Bench:
    """Runs one script on emulated hosts with links of one rate."""

    def __init__(self, script: dict[str, Any], rate: str, hosts: int, python: str) -> None:
        self._script, self._rate, self._hosts, self._python = script, rate, hosts, python

    def turns(self, cell: dict[str, Any], rounds: int) -> Any:
        """Measure what a cell lacks; yield after each turn."""
        for key in ("repository", "commit"):
            cell[key] = self._script.get(key)
        advices, turns = cell.setdefault("advices", []), cell.setdefault("turns_s", {})
        for number in range(rounds):
            if len(advices) <= number:
                advices.append(self._advice())
                yield
            first = advices[0]["remedies"]
            contestants = ["ddp", *(r for r in first if self._can_run(r))]
            begin = number % len(contestants)
            for name in contestants[begin:] + contestants[:begin]:
                taken = turns.setdefault(name, [])
                if len(taken) <= number:
                    seconds, digest = self._turn(name, first.get(name, {}))
                    taken.append(seconds)
                    cell.setdefault("digests", {})[name] = digest
                    where = f"{self._script['name']}, {self._rate}"
                    print(f"{where}: {name} {seconds:.3f} s, {digest[:8]}", flush=True)
                    yield

    def _can_run(self, remedy: str) -> bool:
        if remedy.startswith("accumulate"):
            return "accumulated" in self._script
        return not remedy.startswith("network of") or remedy == "network of 10 Gbit/s"

    def _advice(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            self._run(["-m", "syncline.advise", "-o", folder, *self._script["command"]], self._rate)
            found = Advice.load(Path(folder, "advice.json"))
        return {
            "remedies": {
                r.name.split(",")[0]: {"gain": r.gain, "error": r.error, "how": r.how}
                for r in found.remedies
            },
            "parts": {part.name: part.seconds for part in found.parts},
            "iteration_s": found.iteration_s,
            "limit": found.limit,
        }

    def _turn(self, name: str, remedy: dict[str, Any]) -> tuple[float, str]:
        """Return the seconds an iteration of one start, and a hash of its last parameters."""
        if name in RUNS:
            return self._timed(SETTLED + STEPS, (*RUNS[name], "--cache", "none"))
        if name == "bucket size":
            mib = int(remedy["how"].partition("bucket_cap_mb=")[2].rstrip(")"))
            return self._timed(WARM_UP + STEPS, bucket_cap_mb=mib)
        if name.startswith("network of"):
            return self._timed(WARM_UP + STEPS, rate=FASTER)
        if name.startswith("accumulate"):
            return self._timed(WARM_UP + STEPS, more=self._script["accumulated"])
        return self._timed(WARM_UP + STEPS)

    def _timed(
        self,
        steps: int,
        run: tuple[str, ...] | None = None,
        *,
        rate: str | None = None,
        bucket_cap_mb: int | None = None,
        more: Sequence[str] = (),
    ) -> tuple[float, str]:
        with tempfile.NamedTemporaryFile() as into:
            job = {"passes": steps, "into": into.name, "bucket_cap_mb": bucket_cap_mb}
            launched = [] if run is None else ["-m", "syncline.run", *run]
            timed = ["-m", "benchmarks.timed_script", json.dumps(job)]
            self._run([*launched, *timed, *self._script["command"], *more], rate or self._rate)
            found = json.loads(Path(into.name).read_text())
        if found["phase"] not in ("steady", "torch's DDP"):
            print(f"not settled: {found['phase']}", flush=True)
        begins_s = found["begins_s"][-STEPS - 1 :: ACCUMULATED]
        return median([b - a for a, b in pairwise(begins_s)]) / ACCUMULATED, found["digest"]

    def _run(self, arguments: list[str], rate: str) -> None:
        script = self._script
        searched = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, searched))}
        with Testbed(Cluster.of(hosts=self._hosts, rate=rate)) as bed:
            within = ["env", "-C", script["cwd"], self._python, *arguments]
            result = bed.run(
                within, environment={**environment, **script["environment"]}, timeout_s=DEADLINE_S
            )
        if result.exit_code:
            said = "".join(result.stderr)[-3000:]
            raise SystemExit(f"error: {script['name']} failed ({result.exit_code}): {said}")


def report(cells: dict[str, Any]) -> None:
    """Print each remedy's predicted and measured gain, and how often their order is right."""
    errors: list[float] = []
    right = pairs = 0
    for key, cell in cells.items():
        turns, digests = cell.get("turns_s", {}), cell.get("digests", {})
        if "overlap" in digests:
            bits = "the same" if digests["overlap"] == digests["ddp"] else "other"
            print(f"{key}: {bits} bits as DDP after {WARM_UP + STEPS} steps with overlap")
        measured = {n: median(turns["ddp"]) / median(t) for n, t in turns.items() if "ddp" in turns}
        advices = [advice["remedies"] for advice in cell.get("advices", [])]
        for name, gain in measured.items():
            if found := [remedies[name]["gain"] for remedies in advices if name in remedies]:
                errors += [predicted / gain - 1 for predicted in found]
                middle = median(found)
                print(f"{key:40} {name:22} {middle:6.2f} {gain:6.2f} {middle / gain - 1:+7.1%}")
        for remedies in advices:
            both = [(r["gain"], measured[n]) for n, r in remedies.items() if n in measured]
            for one, other in itertools.combinations(both, 2):
                if abs(one[1] / other[1] - 1) > CERTAIN:
                    pairs += 1
                    right += (one[0] > other[0]) == (one[1] > other[1])
    if errors:
        sizes = [abs(error) for error in errors]
        middle = median(sizes)
        print(f"{len(errors)} predictions: median error {middle:.1%}, at most {max(sizes):.1%}")
    if pairs:
        print(f"order: {right} of {pairs} pairs that differ by more than {CERTAIN:.0%}")


if __name__ == "__main__":
    main()
