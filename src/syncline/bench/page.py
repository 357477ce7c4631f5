"""The report on a benchmark of collectives: tables for a terminal, and a page with the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncline.bench.names import COPY, GLOO, MPIS, OURS, ZERO_COPY
from syncline.bench.result import Benchmark, CollectiveTimes
from syncline.errors import printable
from syncline.report import terminal, units
from syncline.report.chart import Axis, Line, line_chart
from syncline.report.markup import Column, Html, section, table, tag, typeset
from syncline.report.page import page, save_page

__all__ = ["binary_size", "headline", "print_benchmark", "render", "save_report", "widen"]


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
            Padding(_terminal_rows(benchmark, workers), (1, 0), expand=False),
        ]
    parts += [
        Text(printable(f"absent with {a.workers} workers: {a.contestant}: {a.reason}"), "dim")
        for a in benchmark.absent
    ]
    console.print(Group(*parts))


def _terminal_rows(benchmark: Benchmark, workers: int) -> Table:
    found = terminal.plain_table()
    bound = what_bound(benchmark)
    found.add_column("size", justify="right", no_wrap=True)
    found.add_column("contestant", no_wrap=True)
    for column in ("latency", "rounds", "algorithm", "bus", bound, "CPU", "against gloo"):
        found.add_column(column, justify="right", no_wrap=True)
    mine = [entry for entry in benchmark.entries if entry.workers == workers]
    for size_bytes in dict.fromkeys(entry.size_bytes for entry in mine):
        group = [entry for entry in mine if entry.size_bytes == size_bytes]
        for place, entry in enumerate(sorted(group, key=lambda e: e.latency_s)):
            size = binary_size(size_bytes) if place == 0 else ""
            found.add_row(size, *_cells(benchmark, entry))
    return found


def _cells(benchmark: Benchmark, entry: CollectiveTimes) -> tuple[str, ...]:
    gloo = benchmark.of(GLOO, entry.workers, entry.size_bytes)
    if gloo is None or entry.contestant == COPY:
        against = ""
    else:
        against = f"{entry.times_faster_than(gloo):.2f}x"
    return printable(entry.contestant), *figures(benchmark, entry), against


DRAWN = (OURS, ZERO_COPY, GLOO, *MPIS, COPY)
"""Others are in the table only, where lines would lie on each other."""


def save_report(benchmark: Benchmark, target: Path) -> None:
    """Write the page alone to a file that ends in ``.html``, or all files to a directory.

    Raises:
        FileError: the file or the directory cannot be written.
    """
    numbers = {"collectives.json": benchmark}
    save_page(target, render(benchmark), "collectives.html", numbers)


def render(benchmark: Benchmark) -> str:
    """Return the page as the text of one HTML file."""
    parts = [_section(benchmark, workers) for workers in benchmark.worker_counts]
    said = headline(benchmark)
    return page(
        title=benchmark.collective,
        subject=f"{benchmark.collective} · {benchmark.place} · on {benchmark.machine}",
        headline=said[0].upper() + said[1:],
        detail=measured_how(benchmark),
        sections=[*parts, _versions(benchmark)],
        numbers="collectives.json",
    )


def _section(benchmark: Benchmark, workers: int) -> Html:
    mine = [entry for entry in benchmark.entries if entry.workers == workers]
    drawn = [name for name in DRAWN if any(entry.contestant == name for entry in mine)]
    several = len({entry.size_bytes for entry in mine}) > 1
    pictures = [
        _latency_picture(benchmark, workers, drawn),
        _bandwidth_picture(benchmark, workers, drawn),
    ]
    return section(
        f"workers-{workers}",
        f"{workers} workers",
        tag("div", pictures, class_="beside") if several and drawn else None,
        _table(benchmark, mine),
    )


def _table(benchmark: Benchmark, entries: list[CollectiveTimes]) -> Html:
    columns = [
        Column(title="Size", css="name"),
        Column(title="Contestant"),
        Column(title="Latency", numeric=True),
        Column(title="Rounds", numeric=True, wide=True),
        Column(title="Algorithm", numeric=True, wide=True),
        Column(title="Bus", numeric=True),
        Column(title=what_bound(benchmark).capitalize(), numeric=True),
        Column(title="CPU", numeric=True, wide=True),
    ]
    rows = [
        (binary_size(entry.size_bytes), entry.contestant, *figures(benchmark, entry))
        for entry in sorted(entries, key=lambda e: (e.size_bytes, e.latency_s))
    ]
    return table(columns, rows, caption="Every contestant and size, the fastest first")


def _versions(benchmark: Benchmark) -> Html:
    lines = [f"{name}: {version}" for name, version in benchmark.versions.items()]
    lines += [
        f"{a.contestant} was absent ({a.workers} workers): {a.reason}" for a in benchmark.absent
    ]
    return section(
        "contestants", "What was measured", *(tag("p", typeset(x), class_="note") for x in lines)
    )


COLOURS = {OURS: "c-0", ZERO_COPY: "c-4", GLOO: "c-1", MPIS[0]: "c-2", MPIS[1]: "c-3", COPY: "c-5"}


def _latency_picture(benchmark: Benchmark, workers: int, names: Sequence[str]) -> Html:
    """Return the latency over the size, both on logarithmic axes, a line a contestant."""
    rows = {name: _rows(benchmark, workers, name) for name in names if name != COPY}
    return line_chart(
        [
            _line(name, [(e.size_bytes, e.latency_s) for e in entries], units.duration)
            for name, entries in rows.items()
            if entries
        ],
        x=_sizes(benchmark, workers),
        y=Axis.around([e.latency_s for entries in rows.values() for e in entries]),
        x_text=_size_text,
        y_text=lambda seconds: units.duration(seconds, 1),
        title="Latency",
        x_title="Size of the vector",
        about=f"Latency over size with {workers} workers. The table below says the same.",
    )


def _bandwidth_picture(benchmark: Benchmark, workers: int, names: Sequence[str]) -> Html:
    """Return the bus bandwidth over the size, both on logarithmic axes, a line a contestant."""
    rows = {
        name: [(e.size_bytes, benchmark.bus_bytes_per_s(e)) for e in entries]
        for name in names
        if (entries := _rows(benchmark, workers, name))
    }
    return line_chart(
        [_line(name, points, units.rate) for name, points in rows.items()],
        x=_sizes(benchmark, workers),
        y=Axis.around([rate for points in rows.values() for _, rate in points]),
        x_text=_size_text,
        y_text=lambda rate: units.rate(rate).replace(".00 ", " ").replace(".0 ", " "),
        title="Bus bandwidth",
        x_title="Size of the vector",
        about=f"Bus bandwidth over size with {workers} workers. The table below says the same.",
    )


def _rows(benchmark: Benchmark, workers: int, name: str) -> list[CollectiveTimes]:
    mine = (e for e in benchmark.entries if e.workers == workers and e.contestant == name)
    return sorted(mine, key=lambda entry: entry.size_bytes)


def _sizes(benchmark: Benchmark, workers: int) -> Axis:
    mine = {entry.size_bytes for entry in benchmark.entries if entry.workers == workers}
    return Axis.of([float(size) for size in sorted(mine)])


def _size_text(size_bytes: float) -> str:
    return binary_size(round(size_bytes))


def _line(name: str, points: Sequence[tuple[float, float]], text: Callable[[float], str]) -> Line:
    titles = [f"{name}, {_size_text(size)}: {text(value)}" for size, value in points]
    return Line(label=name, css=COLOURS[name], points=points, titles=titles)
