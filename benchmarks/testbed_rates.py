"""Rates asked of an emulated cluster against rates reached, by TCP and by Gloo's all-reduce.

For a transfer of M bytes the rate reached is M / time; the time includes the answer of one byte.
For an all-reduce of M bytes over P hosts it is the bus bandwidth, 2 (P - 1) / P * M / time: the
rate at which each host must send in a ring. A last row per kind is measured on links that are not
limited, to show how fast this machine is by itself: a rate above that cannot be reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import testbed_peers
from benchmarks.common import median, save
from syncline.lab.testbed import Cluster, Testbed
from syncline.lab.testbed.cluster import bit_rate

RATES = ("100mbit", "1gbit", "10gbit", None)
TCP_SIZES = (1_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
GLOO_SIZES = (1_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
LONGEST_S = 5.0
"""Sizes that would take longer are left out."""
DEADLINE_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--hosts", default="2,4", help="of the all-reduces")
    arguments = parser.parse_args()
    rows = []
    for rate in RATES:
        rows += measured("tcp", 2, rate, TCP_SIZES, arguments.repetitions)
    for hosts in map(int, arguments.hosts.split(",")):
        for rate in RATES:
            rows += measured("gloo", hosts, rate, GLOO_SIZES, arguments.repetitions)
    save("testbed_rates", {"settings": vars(arguments), "rows": rows})


def measured(
    kind: str, hosts: int, rate: str | None, sizes: tuple[int, ...], repetitions: int
) -> list[dict[str, Any]]:
    cluster = Cluster.of(hosts=hosts, rate=rate)
    asked = cluster.rate_bytes_per_s
    factor = 1.0 if kind == "tcp" else 2 * (hosts - 1) / hosts
    sizes = tuple(s for s in sizes if asked is None or factor * s / asked < LONGEST_S)
    command = [sys.executable, str(Path(testbed_peers.__file__)), kind, json.dumps(sizes)]
    with Testbed(cluster) as bed:
        result = bed.run([*command, str(repetitions)], timeout_s=DEADLINE_S)
        dropped = sum(passed.dropped_packets for passed in bed.traffic())
    if result.exit_code:
        raise SystemExit(f"{kind} over {cluster} failed: {''.join(result.stderr)}")
    rows = []
    for size, times_s in json.loads(result.stdout[0]).items():
        reached = [factor * int(size) / t for t in times_s]
        share = "" if asked is None else f"  {median(reached) / asked:7.3f} of the rate asked"
        print(
            f"{kind:4}  {hosts} hosts  {'not limited' if rate is None else rate:11}  "
            f"{int(size):>11,} B  {median(times_s) * 1e3:9.3f} ms  "
            f"{bit_rate(median(reached)):>13}{share}",
            flush=True,
        )
        rows.append(
            {
                "kind": kind,
                "hosts": hosts,
                "asked_bytes_per_s": asked,
                "size_bytes": int(size),
                "times_s": times_s,
                "median_s": median(times_s),
                "reached_bytes_per_s": median(reached),
                "of_asked": None if asked is None else median(reached) / asked,
                "dropped_packets": dropped,
            }
        )
    return rows


if __name__ == "__main__":
    main()
