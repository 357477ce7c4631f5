"""What ``syncline advise`` predicts for public scripts, beside what its remedies then do.

``--manifest`` names a JSON file that lists scripts: ``name``, ``cwd``, ``command`` (the script and
its arguments, for at least 300 steps), ``environment``, ``repository`` and ``commit``, and
optionally ``accumulated``: more arguments, with which it takes an optimizer step after 4 batches.
For each script and rate, ``advise`` observes the unmodified script on emulated hosts, before the
rounds and after them. It trains under DDP and under each remedy in turns; both advices are compared
with the medians over all rounds. A cell is kept once it is measured, so the same command goes on
where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import raw
from benchmarks.common import RESULTS, machine, median
from benchmarks.contestant import Contestant
from benchmarks.step_results import today
from syncline.lab.testbed import Cluster, Testbed
from syncline.plan.advice import Advice

RATES = ("100mbit", "250mbit", "1gbit")
ACCUMULATED = 4  # batches
WARM_UP, MOST, TURN = 2 * ACCUMULATED, 200, 4 * ACCUMULATED
"""Passes before the first turn of DDP, of Syncline if it has not decided before, and of a turn."""
DEADLINE_S = 600.0
FASTER = "10gbit"
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
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after")
    parser.add_argument("--report", action="store_true", help="only show what was measured")
    arguments = parser.parse_args()
    path = RESULTS / "remedies.json"
    cells: dict[str, Any] = raw.read(path)["cells"] if raw.exists(path) else {}
    scripts = {script["name"]: script for script in json.loads(arguments.manifest.read_text())}
    names = arguments.scripts.split(",") if arguments.scripts else list(scripts)
    until_s = time.monotonic() + 60 * arguments.minutes

    if not arguments.report:
        for name, rate in itertools.product(names, arguments.rates.split(",")):
            key = f"{name}, {rate}"
            if key in cells:
                continue
            if time.monotonic() > until_s:
                raise SystemExit("the time is up; the same command goes on from here")
            bench = Bench(scripts[name], rate, arguments.hosts, arguments.python)
            cells[key] = bench.measure(arguments.rounds)
            record = {
                "benchmark": "remedies",
                "date": today(),
                "command": "python -m benchmarks.remedies --manifest scripts.json",
                "hosts": arguments.hosts,
                "machine": machine(),
                "cells": cells,
            }
            raw.write(path, record)
    report(cells)


class Bench:
    """Runs one script on emulated hosts with links of one rate."""

    def __init__(self, script: dict[str, Any], rate: str, hosts: int, python: str) -> None:
        self._script, self._rate, self._hosts, self._python = script, rate, hosts, python

    def measure(self, rounds: int) -> dict[str, Any]:
        """Return two advices, and the seconds a pass of each contestant in each round."""
        before = self._advice()
        remedies = before["remedies"]
        with contextlib.ExitStack() as stack:
            contestants: dict[str, Contestant] = {}
            for name in ("ddp", *filter(self._can_run, remedies)):
                contestant = self._contestant(name, remedies.get(name, {}), rounds)
                contestants[name] = stack.enter_context(contestant)
                self._say(f"{name} is ready")
            turns_s: dict[str, list[float]] = {name: [] for name in contestants}
            digests: dict[str, str] = {}
            for number in range(rounds):
                begin = number % len(contestants)
                names = list(contestants)
                for name in names[begin:] + names[:begin]:
                    found = contestants[name].turn()
                    begins_s, passes = found["begins_s"], TURN - ACCUMULATED
                    turns_s[name].append((begins_s[TURN] - begins_s[ACCUMULATED]) / passes)
                    digests[name] = found["digest"]
                    self._say(f"{name} {turns_s[name][-1]:.3f} s, {found['phase']}")
        return {
            "repository": self._script.get("repository"),
            "commit": self._script.get("commit"),
            "advices": [before, self._advice()],
            "turns_s": turns_s,
            "digests": digests,
        }

    def _say(self, text: str) -> None:
        print(f"{self._script['name']}, {self._rate}: {text}", flush=True)

    def _can_run(self, remedy: str) -> bool:
        if remedy.startswith("accumulate"):
            return "accumulated" in self._script
        return not remedy.startswith("network of") or remedy == "network of 10 Gbit/s"

    def _contestant(self, name: str, remedy: dict[str, Any], rounds: int) -> Contestant:
        script, rate, mib, more = self._script, self._rate, None, ()
        if name == "bucket size":
            mib = int(remedy["how"].partition("bucket_cap_mb=")[2].rstrip(")"))
        elif name.startswith("network of"):
            rate = FASTER
        elif name.startswith("accumulate"):
            more = script["accumulated"]
        run = ("-m", "syncline.run", *RUNS[name], "--cache", "none") if name in RUNS else ()
        return Contestant(
            [*script["command"], *more],
            cluster=Cluster.of(hosts=self._hosts, rate=rate),
            environment=script["environment"],
            job={
                "warm_up": WARM_UP,
                "most": MOST,
                "passes": TURN,
                "digest_at": WARM_UP + rounds * TURN,
                "bucket_cap_mb": mib,
            },
            launched=run,
            python=self._python,
            folder=script["cwd"],
        )

    def _advice(self) -> dict[str, Any]:
        script = self._script
        with tempfile.TemporaryDirectory() as folder:
            advise = ["-m", "syncline.advise", "-o", folder, *script["command"]]
            with Testbed(Cluster.of(hosts=self._hosts, rate=self._rate)) as bed:
                result = bed.run(
                    ["env", "-C", script["cwd"], self._python, *advise],
                    environment={"OMP_NUM_THREADS": "1", **script["environment"]},
                    timeout_s=DEADLINE_S,
                )
            if result.exit_code:
                said = "".join(result.stderr)[-3000:]
                raise SystemExit(f"error: {script['name']} failed ({result.exit_code}): {said}")
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


def report(cells: dict[str, Any]) -> None:
    """Print each remedy's predicted and measured gain, and how often their order is right."""
    errors: list[float] = []
    right = pairs = 0
    for key, cell in cells.items():
        turns, digests = cell.get("turns_s", {}), cell.get("digests", {})
        if "overlap" in digests:
            bits = "the same" if digests["overlap"] == digests["ddp"] else "other"
            print(f"{key}: {bits} bits as DDP after as many passes with overlap")
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
