"""Mixed collectives and messages in several groups for minutes: all results right, nothing growing.

``python -m benchmarks.soak [--minutes 10]`` runs ranks that share a group by shared memory, one by
TCP on the loopback device, and one by both, as on two hosts. All ranks draw the same
collectives or messages, sizes, dtypes, reductions, roots and algorithms, start them in one order,
up to four under way at once, and check every result.

``tools/sanitized-soak`` runs the same on a native core that was built with a sanitizer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import raw
from benchmarks.common import RESULTS, save
from benchmarks.ranks import exit_codes
from benchmarks.soak_worker import Soak, work

BUILDS = ("plain", "address", "thread")
GRACE_S = 120.0
"""For the ranks to start and to end."""


def run(soak: Soak) -> dict[str, Any]:
    """Let all ranks work; return what they did and held.

    Raises:
        RuntimeError: a rank failed or hangs.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = exit_codes(work, soak.ranks, folder, soak, soak.seconds + GRACE_S)
        if any(code != 0 for code in codes):
            raise RuntimeError(f"exit codes {codes}; None: the rank hung")
        ranks = [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(soak.ranks)]
    return {
        "command": " ".join(["python -m benchmarks.soak", *sys.argv[1:]]),
        "ranks": soak.ranks,
        "groups": soak.routes,
        "took_s": time.monotonic() - began_s,
        "collectives": ranks[0]["collectives"],
        "descriptors": [rank["descriptors"] for rank in ranks],
        "memory_bytes": [rank["memory_bytes"] for rank in ranks],
    }


def known() -> dict[str, Any]:
    """Return what earlier runs have found, by the build of the native core."""
    path = RESULTS / "soak.json"
    earlier: dict[str, Any] = raw.read(path) if raw.exists(path) else {}
    return {name: each for name, each in earlier.items() if name in BUILDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--build", default=BUILDS[0], choices=BUILDS, help="of the native core, to name the result"
    )
    options = parser.parse_args()
    found = run(
        Soak(
            ranks=options.ranks,
            seconds=options.minutes * 60,
            seed=options.seed,
            routes=("auto", "tcp", "mixed"),
        )
    )
    each = Counter(found["collectives"])
    print(f"{each.total()} collectives in {found['took_s']:.0f} s, all results right")
    for name, count in sorted(each.items()):
        print(f"  {count:7} {name}")
    print("open descriptors of each rank, when warm and at the end:", found["descriptors"])
    print("resident bytes of each rank, when warm and at the end:", found["memory_bytes"])
    save("soak", {**known(), options.build: found})


if __name__ == "__main__":
    main()
