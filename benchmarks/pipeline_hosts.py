"""LP, MST and BE of linear-pipeline between emulated hosts: how their times grow with the workers.

Every host has a link of its own, slow enough that no processor limits a transfer. In each round all
algorithms take a turn, of one unmeasured call and a few measured ones.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from benchmarks.common import median, save
from syncline.comm.collectives import Collective
from syncline.comm.groups import Choice
from syncline.errors import PeerError
from syncline.lab.bench.launch import Team, meeting, torch_team
from syncline.lab.bench.messages import Order, Refused
from syncline.lab.bench.result import OURS
from syncline.lab.testbed import Cluster

HOSTS = tuple(range(2, 9))
SIZE_BYTES = 4 << 20
BLOCK_BYTES = 64 << 10
"""Of the pipeline; linear-pipeline, section 3.2."""
FAMILIES = {
    "LP": "linear-pipeline",
    "MST": "minimum-spanning-tree",
    "BE": "bidirectional-exchange",
}
COLLECTIVES: tuple[Collective, ...] = ("broadcast", "reduce", "all-reduce")
ITERATIONS = 2
TIMEOUT_S = 60.0


class Cell(NamedTuple):
    """What takes a turn."""

    collective: Collective
    family: str


CELLS = [Cell(collective, family) for collective in COLLECTIVES for family in FAMILIES]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="200mbit", help="of every link")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for hosts in HOSTS:
        cluster = Cluster.of(hosts=hosts, rate=arguments.rate)
        for cell, rounds_s in measure(cluster, arguments.rounds).items():
            rows.append({"workers": hosts, **cell._asdict(), "rounds_s": rounds_s})
            print(
                f"{hosts} {cell.collective} by {cell.family}: {median(rounds_s):.3f} s", flush=True
            )
    save(
        "pipeline_hosts",
        {
            "settings": vars(arguments),
            "size_bytes": SIZE_BYTES,
            "block_bytes": BLOCK_BYTES,
            "rate_bytes_per_s": cluster.rate_bytes_per_s,
            "iterations": ITERATIONS,
            "measured": rows,
        },
    )


def measure(cluster: Cluster, rounds: int) -> dict[Cell, list[float]]:
    """Return the slowest rank's seconds of a call in every round."""
    found: dict[Cell, list[float]] = {cell: [] for cell in CELLS}
    with (
        meeting(cluster, cluster.workers, choices="built-in", timeout_s=TIMEOUT_S) as at,
        torch_team(at) as team,
    ):
        for number in range(rounds):
            for cell in (*CELLS[number:], *CELLS[:number]):
                found[cell].append(_seconds(team, cell))
    return found


def _seconds(team: Team, cell: Cell) -> float:
    order = Order(
        contestant=OURS,
        collective=cell.collective,
        choice=Choice(
            FAMILIES[cell.family], SIZE_BYTES // BLOCK_BYTES if cell.family == "LP" else None
        ),
        size_bytes=SIZE_BYTES,
        iterations=ITERATIONS,
    )
    answer = team.run(order)
    if isinstance(answer, Refused):
        raise PeerError(f"{cell.collective} by {cell.family}: {answer.reason}")
    return answer.wall_s


if __name__ == "__main__":
    main()
