"""A benchmark as tables for a terminal: a row a contestant and size."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncline.bench.names import COPY, GLOO
from syncline.bench.result import Benchmark, Entry
from syncline.bench.words import binary_size, measured_how, of_bound, spread_text, what_bound
from syncline.errors import printable
from syncline.report import units

__all__ = ["benchmark_table", "print_benchmark"]

WIDTH = 160
"""Columns where nobody reads on a screen."""


def print_benchmark(console: Console, benchmark: Benchmark) -> None:
    """Print the tables, one a worker count."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(benchmark_table(benchmark))


def benchmark_table(benchmark: Benchmark) -> RenderableType:
    """Return the tables: sizes in the order in which they were asked for, the fastest first."""
    parts: list[RenderableType] = []
    for workers in benchmark.worker_counts:
        title = f"{benchmark.collective} · {workers} workers · {benchmark.place}"
        parts += [
            Text(printable(f"{title} · {measured_how(benchmark)}"), "bold"),
            Padding(_rows(benchmark, workers), (1, 0), expand=False),
        ]
    parts += [
        Text(printable(f"absent with {a.workers} workers: {a.contestant}: {a.reason}"), "dim")
        for a in benchmark.absent
    ]
    return Group(*parts)


def _rows(benchmark: Benchmark, workers: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(
        (
            "size",
            "contestant",
            "latency",
            "rounds",
            "algorithm",
            "bus",
            what_bound(benchmark),
            "CPU",
            "against gloo",
        )
    ):
        table.add_column(column, justify="left" if number == 1 else "right", no_wrap=True)
    mine = [entry for entry in benchmark.entries if entry.workers == workers]
    for size_bytes in dict.fromkeys(entry.size_bytes for entry in mine):
        group = [entry for entry in mine if entry.size_bytes == size_bytes]
        for place, entry in enumerate(sorted(group, key=lambda e: e.latency_s)):
            size = binary_size(size_bytes) if place == 0 else ""
            table.add_row(size, *_cells(benchmark, entry))
    return table


def _cells(benchmark: Benchmark, entry: Entry) -> tuple[str, ...]:
    gloo = benchmark.of(GLOO, entry.workers, entry.size_bytes)
    against = "" if gloo is None or entry.contestant == COPY else entry.times_faster_than(gloo)
    return (
        printable(entry.contestant),
        units.duration(entry.latency_s),
        spread_text(entry),
        units.rate(entry.algorithm_bytes_per_s),
        units.rate(benchmark.bus_bytes_per_s(entry)),
        of_bound(benchmark, entry),
        units.duration(entry.cpu_median_s),
        against if isinstance(against, str) else f"{against:.2f}x",
    )
