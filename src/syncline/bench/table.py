"""A benchmark as tables for a terminal: a row a contestant and size."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncline.bench.names import COPY, GLOO, MPIS, OURS
from syncline.bench.result import Benchmark, CollectiveTimes
from syncline.errors import printable
from syncline.report import terminal, units

__all__ = [
    "binary_size",
    "figures",
    "headline",
    "measured_how",
    "print_benchmark",
    "what_bound",
    "widen",
]


def binary_size(size_bytes: int) -> str:
    """Return a size in powers of 1,024 where it is one: ``"64 KiB"``, ``"1.5 MiB"``, ``"12 B"``."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def headline(benchmark: Benchmark) -> str:
    """Return in a sentence, without its full stop, how Syncline does beside the nearest other."""
    ratios = []
    for ours in (entry for entry in benchmark.entries if entry.contestant == OURS):
        found = (benchmark.of(name, ours.workers, ours.size_bytes) for name in (GLOO, *MPIS))
        others = [ours.times_faster_than(other) for other in found if other is not None]
        if others:
            ratios.append((min(others), ours))
    what = f"{benchmark.collective} on {benchmark.place}"
    if not ratios:
        return what
    (worst, at), (best, most) = min(ratios, key=_first), max(ratios, key=_first)
    return (
        f"{what}: against the fastest other, Syncline is {worst:.2f} ({_where(at)}) to {best:.2f} "
        f"({_where(most)}) times as fast"
    )


def _first(pair: tuple[float, CollectiveTimes]) -> float:
    return pair[0]


def _where(entry: CollectiveTimes) -> str:
    return f"{binary_size(entry.size_bytes)}, {entry.workers} workers"


def measured_how(benchmark: Benchmark) -> str:
    """Return how the medians came about."""
    return f"medians of {units.counted(benchmark.rounds, 'round')}, in turns"


def _spread(entry: CollectiveTimes) -> str:
    """Return the fastest and the slowest round, such as ``"1.39 to 1.42 ms"``."""
    low, high = map(units.duration, entry.spread_s)
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def what_bound(benchmark: Benchmark) -> str:
    """Return what the bus bandwidth is compared with."""
    return "of memcpy" if benchmark.rate_bytes_per_s is None else "of line rate"


def figures(benchmark: Benchmark, entry: CollectiveTimes) -> tuple[str, ...]:
    """Return latency, rounds, algorithm and bus bandwidth, the share of the bound, and CPU time.

    The share is empty where the bound is not known.
    """
    share = benchmark.of_bound(entry)
    return (
        units.duration(entry.latency_s),
        _spread(entry),
        units.rate(entry.algorithm_bytes_per_s),
        units.rate(benchmark.bus_bytes_per_s(entry)),
        "" if share is None else units.percent(share),
        units.duration(entry.cpu_median_s),
    )


WIDTH = 160
"""Columns where the output is no terminal."""


def widen(console: Console) -> None:
    """Give tables the width that they need where no terminal limits it."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)


def print_benchmark(console: Console, benchmark: Benchmark) -> None:
    """Print a table a worker count: sizes in the order asked for, the fastest first."""
    widen(console)
    parts: list[RenderableType] = []
    for workers in benchmark.worker_counts:
        title = f"{benchmark.collective} · {workers} workers · {benchmark.place}"
        parts += [
            terminal.title(f"{title} · {measured_how(benchmark)}"),
            Padding(_rows(benchmark, workers), (1, 0), expand=False),
        ]
    parts += [
        Text(printable(f"absent with {a.workers} workers: {a.contestant}: {a.reason}"), "dim")
        for a in benchmark.absent
    ]
    console.print(Group(*parts))


def _rows(benchmark: Benchmark, workers: int) -> Table:
    table = terminal.plain_table()
    bound = what_bound(benchmark)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("contestant", no_wrap=True)
    for column in ("latency", "rounds", "algorithm", "bus", bound, "CPU", "against gloo"):
        table.add_column(column, justify="right", no_wrap=True)
    mine = [entry for entry in benchmark.entries if entry.workers == workers]
    for size_bytes in dict.fromkeys(entry.size_bytes for entry in mine):
        group = [entry for entry in mine if entry.size_bytes == size_bytes]
        for place, entry in enumerate(sorted(group, key=lambda e: e.latency_s)):
            size = binary_size(size_bytes) if place == 0 else ""
            table.add_row(size, *_cells(benchmark, entry))
    return table


def _cells(benchmark: Benchmark, entry: CollectiveTimes) -> tuple[str, ...]:
    gloo = benchmark.of(GLOO, entry.workers, entry.size_bytes)
    if gloo is None or entry.contestant == COPY:
        against = ""
    else:
        against = f"{entry.times_faster_than(gloo):.2f}x"
    return printable(entry.contestant), *figures(benchmark, entry), against
