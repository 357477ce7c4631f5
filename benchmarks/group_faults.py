"""Kill ranks of a group at random moments, and see what the survivors notice, and what is left.

``python -m benchmarks.group_faults [--trials 200]`` runs groups of 2, 3 and 4 ranks over shared
memory, over TCP on the loopback device, as between hosts, and over both, where ranks take
themselves for ranks of several hosts of which one at least has several: idle or in the middle of an
all-reduce, small or large, by different algorithms. In each trial one rank is ended by SIGKILL at a
random moment. Every survivor must get a ``PeerError`` that names it, close its group, and exchange
with the other survivors in a new one; afterwards no file, socket, process or open descriptor may be
left.

``--routes mixed`` measures one of the three again, and keeps what is known of the others.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks import raw
from benchmarks.common import RESULTS, median, save, spread
from benchmarks.group_faults_worker import Trial, work
from benchmarks.ranks import exit_codes
from syncline.comm.groups import Choice, Transport

Route = Literal["auto", "tcp", "mixed"]
DEADLINE_S = 60.0
"""How long a trial may take on a loaded machine."""

MOST_S = 0.05
"""A rank dies at most so long after the ranks have met."""
ALGORITHMS = (
    None,
    Choice("direct"),
    Choice("ring"),
    Choice("recursive-doubling"),
    Choice("minimum-spanning-tree"),
    Choice("linear-pipeline", 5),
)
ROUTES: tuple[Route, ...] = get_args(Route)
SIZES = (1, 5_000, 1_000_000)
"""Elements of 4 bytes: one fragment, several, and more than can be under way at once."""


def draw(chance: random.Random, route: Route) -> Trial:
    """Return a random trial."""
    ranks = chance.choice((3, 4) if route == "mixed" else (2, 3, 4))
    transport: Transport = "tcp" if route == "tcp" else "auto"
    hosts = (0,) * ranks
    while route == "mixed" and not 1 < len(set(hosts)) < ranks:
        hosts = tuple(chance.randrange(ranks - 1) for _ in range(ranks))
    algorithms = (*ALGORITHMS, Choice("hierarchical")) if route == "mixed" else ALGORITHMS
    return Trial(
        ranks=ranks,
        transport=transport,
        hosts=hosts,
        victim=chance.randrange(ranks),
        after_s=chance.uniform(0, MOST_S),
        elements=chance.choice(SIZES),
        algorithm=chance.choice(algorithms),
        idle=chance.random() < 0.3,
    )


def run(trial: Trial) -> dict[str, Any]:
    """Run a trial; return how long survivors took to notice, and what is left.

    Raises:
        RuntimeError: a survivor hangs, dies, or says something else.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = exit_codes(work, trial.ranks, folder, trial, DEADLINE_S)
        hanging = [rank for rank, code in enumerate(codes) if code is None]
        expected = [-signal.SIGKILL if rank == trial.victim else 0 for rank in range(trial.ranks)]
        if codes != expected:
            raise RuntimeError(f"{trial}: ranks {hanging} hang, exit codes {codes}")
        killed_s = float((folder / "killed").read_text())
        seen = [
            json.loads((folder / f"survivor-{rank}").read_text())
            for rank in range(trial.ranks)
            if rank != trial.victim
        ]
    for survivor in seen:
        if f"rank {trial.victim} has " not in survivor["said"]:
            raise RuntimeError(f"{trial}: a survivor said {survivor['said']!r}")
    return {
        "noticed_s": [survivor["noticed_s"] - killed_s for survivor in seen],
        "said": sorted({survivor["said"] for survivor in seen}),
        # Segments and sockets have no names in a file system: no descriptors, nothing left.
        "left": [survivor["descriptors_left"] for survivor in seen if survivor["descriptors_left"]],
    }


def record(trials: Sequence[Trial], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the trials of one route come to."""
    noticed_s = [seconds for each in found for seconds in each["noticed_s"]]
    return {
        "trials": len(trials),
        "idle": sum(trial.idle for trial in trials),
        "survivors": len(noticed_s),
        "noticed_s": {"median": median(noticed_s), "worst": max(noticed_s)},
        "left": [thing for each in found for thing in each["left"]],
        "said": sorted({words for each in found for words in each["said"]})[:20],
    }


def known(but: Sequence[Route]) -> dict[str, Any]:
    """Return what an earlier run has found of the other routes."""
    path = RESULTS / "group_faults.json"
    earlier = raw.read(path) if raw.exists(path) else {}
    return {route: earlier[route] for route in ROUTES if route in earlier and route not in but}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200, help="of each route")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--routes", nargs="+", default=ROUTES, choices=ROUTES)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    records = known(options.routes)
    for route in options.routes:
        began_s = time.monotonic()
        trials = [draw(chance, route) for _ in range(options.trials)]
        found = [run(trial) for trial in trials]
        mine = record(trials, found)
        records[route] = {
            "command": " ".join(["python -m benchmarks.group_faults", *sys.argv[1:]]),
            **mine,
            "took_s": time.monotonic() - began_s,
        }
        noticed_s = [seconds for each in found for seconds in each["noticed_s"]]
        print(f"{route}: {len(trials)} kills, {len(noticed_s)} survivors with a PeerError each")
        print(f"  seconds until a survivor noticed: {spread(noticed_s)}")
        print(f"  left behind: {mine['left'] or 'nothing'}", flush=True)
    save("group_faults", records)
    if any(records[route]["left"] for route in options.routes):
        sys.exit(1)


if __name__ == "__main__":
    main()
