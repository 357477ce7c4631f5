"""Flat rings and trees over hosts, chunk by chunk: bytes occupy links, and latencies only delay."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reproduce.dependencies import dependencies
from rich.console import Console
from rich.table import Table

from benchmarks.common import save
from syncline.comm.collectives import program
from syncline.plan.exchange import Exchange, Link
from syncline.plan.simulator.graph import TaskGraph

CASES = (
    *((1, 8), (2, 1), (2, 2), (2, 8), (3, 1), (3, 4), (4, 1), (4, 2), (4, 4), (5, 1), (6, 1)),
    *((8, 1), (8, 7), (10, 1), (16, 1), (16, 4), (18, 1), (32, 8), (100, 1), (256, 8), (2048, 1)),
)
"""Hosts, and workers on each."""
SLOWER = (0.5, 3.0, 30.0)
SIZES = (0, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
INSIDE = Link(alpha_s=5e-6, beta_s_per_byte=1 / 12e9, gamma_s_per_byte=0.0)


def between(slower: float) -> Link:
    """Return the link between hosts that is that much slower than the one inside."""
    return Link(alpha_s=2e-5, beta_s_per_byte=slower / 12e9, gamma_s_per_byte=0.0)


def ring_s(hosts: int, local: int, size: int, across: Link) -> float:
    """Return the seconds of a flat ring over hosts with ``local`` workers each."""
    workers = hosts * local
    hop = np.arange(workers)
    leaves = hop % local == local - 1 if hosts > 1 else np.zeros(workers, bool)
    alpha = np.where(leaves, across.alpha_s, INSIDE.alpha_s)
    beta = np.where(leaves, across.beta_s_per_byte, INSIDE.beta_s_per_byte)
    arrived, free = np.zeros(workers), np.zeros(workers)
    for _ in range(2 * (workers - 1)):
        free = np.maximum(arrived, free) + beta * size / workers
        arrived = np.roll(free + alpha, 1)
    return float(arrived.max())


def trees_s(hosts: int, local: int, size: int, across: Link) -> float:
    """Return the seconds of double trees over hosts, whose workers form chains.

    A port passes one chunk at a time: of those that are there, the first in the program.
    """
    graph, chunks = TaskGraph(), 1024 if hosts < 256 else 2048  # so that filling takes 2 %
    delays = graph.add_lane(capacity=None, in_order=False)
    cells = np.arange(hosts * chunks)  # every chunk of every host

    def add(host: NDArray[Any], link: Link, alpha_s: float, passes: int = 1) -> tuple[Any, Any]:
        """Return a task on a port of each host, and the task that ends when its bytes arrive."""
        ports = np.array([graph.add_lane(in_order=False) for _ in range(hosts)])
        busy_ns = round(1e9 * passes * link.beta_s_per_byte * size / chunks)
        sent = graph.add_tasks(ports[host], np.full(len(host), busy_ns)) + np.arange(len(host))
        delay_ns = np.full(len(host), round(1e9 * alpha_s))
        arrived = graph.add_tasks(delays, delay_ns) + np.arange(len(host))
        graph.add_edges(sent, arrived)
        return sent, arrived

    def chain(tasks: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pass all cells along; each waits for the tasks that are at it."""
        for _ in range(local - 1):
            # In longer chains both ways share the ports of the workers in the middle.
            sent, arrived = add(cells // chunks, INSIDE, INSIDE.alpha_s, min(local - 1, 2))
            graph.add_edges(tasks, sent[at])
            tasks, at = arrived, cells
        return tasks

    none = np.empty(0, np.int64)
    there, at = chain(none, none), cells if local > 1 else none
    if hosts > 1:
        tree = program("all-reduce", "double-binary-trees", hosts, blocks=chunks)
        source, destination = (
            rank.astype(np.int64) * chunks + tree.block_start
            for rank in (tree.source, tree.destination)
        )
        sent, arrived = add(tree.source, across, across.alpha_s)
        received, _ = add(tree.destination, across, 0.0)
        needs = dependencies(tree)
        graph.add_edges(arrived, received)
        if local > 1:
            graph.add_edges(there[source], sent)
        pairs = needs.send_after_result, needs.result_after_result
        for (later, earlier), after in zip(pairs, (sent, received), strict=True):
            graph.add_edges(received[earlier], after[later])
        there, at = np.concatenate([there, received]), np.concatenate([at, destination])
    chain(there, at)
    _, stop = graph.run()
    return float(stop.max()) / 1e9


def main() -> None:
    """Compare the formulas with the simulation."""
    table = Table(title="differences of the formulas, of all sizes the largest")
    for column in ("hosts", "workers", "link slower", "flat-ring", "flat-tree"):
        table.add_column(column, justify="right")
    rows = []
    for (hosts, local), slower in itertools.product(CASES, SLOWER):
        if hosts * local > 1000 and slower != 3:
            continue  # a minute each
        row: dict[str, Any] = {"hosts": hosts, "workers": hosts * local, "slower": slower}
        across = between(slower)
        for algorithm, simulated in (("flat-ring", ring_s), ("flat-tree", trees_s)):
            exchange = Exchange(
                algorithm=algorithm, workers=hosts * local, hosts=hosts, inside=INSIDE, link=across
            )
            seconds = exchange.curve().seconds
            row[algorithm] = [seconds(n) / simulated(hosts, local, n, across) - 1 for n in SIZES]
        rows.append(row)
        most = (max(row[name], key=abs) for name in ("flat-ring", "flat-tree"))
        table.add_row(*map(str, (hosts, hosts * local, slower)), *(f"{x:+.1%}" for x in most))
    Console(width=100).print(table)
    save("flat_pipelines", {"sizes_bytes": SIZES, "rows": rows})


if __name__ == "__main__":
    main()
