"""The report on a benchmark of collectives: tables for a terminal, and a page with the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncline.errors import printable
from syncline.files.report import terminal, units
from syncline.files.report.chart import Axis, Line, line_chart
from syncline.files.report.markup import Column, Html, note, section, table, tag, titled, typeset
from syncline.files.report.page import page, save_page
from syncline.lab.bench.result import COPY, GLOO, MPIS, OURS, PLAIN, Benchmark, CollectiveTimes


def binary_size(size_bytes: float) -> str:
    """Return a size in powers of 1,024 where it is one: ``"64 KiB"``, ``"1.5 MiB"``, ``"12 B"``."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes:.0f} B"


def headline(benchmark: Benchmark) -> str:
    """Return how Syncline compares with the fastest other library; no full stop at the end."""
    ratios = []
    for ours in (entry for entry in benchmark.entries if entry.contestant == OURS):
        found = (benchmark.of(name, ours.workers, ours.size_bytes) for name in (GLOO, *MPIS))
        others = [ours.times_faster_than(other) for other in found if other is not None]
        if others:
            ratios.append((min(others), ours))
    what = f"{benchmark.collective} on {benchmark.place}"
    if not ratios:
        return what
    (worst, at), (best, most) = min(ratios, key=itemgetter(0)), max(ratios, key=itemgetter(0))
    return (
        f"{what}: against the fastest other, Syncline is {worst:.2f} ({_where(at)}) to {best:.2f} "
        f"({_where(most)}) times as fast"
    )


def _where(entry: CollectiveTimes) -> str:
    return f"{binary_size(entry.size_bytes)}, {entry.workers} workers"


def measured_how(benchmark: Benchmark) -> str:
    """Return what the medians are taken over, in words."""
    return f"medians of {units.counted(benchmark.rounds, 'round')}, interleaved"


def _spread(entry: CollectiveTimes) -> str:
    """Return the fastest and the slowest round, such as ``"1.39 to 1.42 ms"``."""
    low, high = map(units.duration, entry.spread_s)
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def _columns(benchmark: Benchmark) -> list[Column[CollectiveTimes]]:
    """Return the columns of the table, in a terminal and on the page."""
    bound = "of memcpy" if benchmark.rate_bytes_per_s is None else "of line rate"
    return [
        Column("size", lambda entry: binary_size(entry.size_bytes), css="name"),
        Column("contestant", lambda entry: entry.contestant),
        Column("latency", lambda entry: units.duration(entry.latency_s), numeric=True),
        Column("rounds", _spread, numeric=True, wide=True),
        Column("algorithm", lambda e: units.rate(e.algorithm_bytes_per_s), numeric=True, wide=True),
        Column("bus", lambda entry: units.rate(benchmark.bus_bytes_per_s(entry)), numeric=True),
        Column(bound, lambda entry: units.percent(benchmark.of_bound(entry)), numeric=True),
        Column("CPU", lambda e: units.duration(e.cpu_median_s), numeric=True, wide=True),
    ]


def print_benchmark(console: Console, benchmark: Benchmark) -> None:
    """Print one table per worker count: sizes in the order asked for, the fastest first."""
    terminal.widen(console)
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
    mine = [entry for entry in benchmark.entries if entry.workers == workers]
    fastest = {
        size: min((e for e in mine if e.size_bytes == size), key=lambda e: e.latency_s)
        for size in dict.fromkeys(entry.size_bytes for entry in mine)
    }

    def size(entry: CollectiveTimes) -> str:
        return binary_size(entry.size_bytes) if entry is fastest[entry.size_bytes] else ""

    def against_gloo(entry: CollectiveTimes) -> str:
        gloo = benchmark.of(GLOO, entry.workers, entry.size_bytes)
        if gloo is None or entry.contestant in PLAIN:
            return ""
        return f"{entry.times_faster_than(gloo):.2f}x"

    columns = [
        Column("size", size, numeric=True),
        *_columns(benchmark)[1:],
        Column("against gloo", against_gloo, numeric=True),
    ]
    order = list(fastest)
    mine.sort(key=lambda entry: (order.index(entry.size_bytes), entry.latency_s))
    return terminal.table(columns, mine, folds=False)


COLOURS = {OURS: "c-0", GLOO: "c-1", MPIS[0]: "c-2", MPIS[1]: "c-3", COPY: "c-5"}
"""Colours of the contestants that are drawn; the lines of more would overlap."""


def save_report(benchmark: Benchmark, target: Path) -> None:
    """Write the page, alone or with the numbers, as ``save_page`` does."""
    save_page(target, render(benchmark), "collectives.html", {"collectives.json": benchmark})


def render(benchmark: Benchmark) -> str:
    """Return the page as the text of one HTML file."""
    parts = [_section(benchmark, workers) for workers in benchmark.worker_counts]
    lines = [f"{name}: {version}" for name, version in benchmark.versions.items()]
    lines += [
        f"{a.contestant} was absent ({a.workers} workers): {a.reason}" for a in benchmark.absent
    ]
    notes = (note(typeset(line)) for line in lines)
    text = headline(benchmark)
    return page(
        title=benchmark.collective,
        subject=f"{benchmark.collective} · {benchmark.place} · on {benchmark.machine}",
        headline=text[0].upper() + text[1:],
        detail=measured_how(benchmark),
        sections=[*parts, section("contestants", "What was measured", *notes)],
        numbers="collectives.json",
    )


def _section(benchmark: Benchmark, workers: int) -> Html:
    mine = [entry for entry in benchmark.entries if entry.workers == workers]
    drawn = [name for name in COLOURS if any(entry.contestant == name for entry in mine)]
    several = len({entry.size_bytes for entry in mine}) > 1
    pictures = []
    compared = [name for name in drawn if name not in PLAIN]
    if several and compared:
        pictures = [
            _picture(
                mine,
                compared,
                lambda entry: entry.latency_s,
                title="Latency",
                text=units.duration,
            ),
            _picture(
                mine,
                drawn,
                benchmark.bus_bytes_per_s,
                title="Bus bandwidth",
                text=units.rate,
            ),
        ]
    return section(
        f"workers-{workers}",
        f"{workers} workers",
        tag("div", pictures, class_="beside") if pictures else None,
        table(
            titled(_columns(benchmark)),
            sorted(mine, key=lambda entry: (entry.size_bytes, entry.latency_s)),
            caption="Every contestant and size, the fastest first",
        ),
    )


def _picture(
    entries: Sequence[CollectiveTimes],
    names: Sequence[str],
    value: Callable[[CollectiveTimes], float],
    *,
    title: str,
    text: Callable[[float], str],
) -> Html:
    """Return a value over the size, both on logarithmic axes, one line per contestant."""
    by_size = sorted(entries, key=lambda entry: entry.size_bytes)
    where = f"with {entries[0].workers} workers"
    sizes = dict.fromkeys(float(entry.size_bytes) for entry in by_size)
    lines = []
    for name in names:
        points = [(e.size_bytes, value(e)) for e in by_size if e.contestant == name]
        titles = [f"{name}, {binary_size(size)}: {text(y)}" for size, y in points]
        lines.append(Line(label=name, css=COLOURS[name], points=points, titles=titles))
    return line_chart(
        lines,
        x=Axis.of(list(sizes)),
        y=Axis.around([y for line in lines for _, y in line.points]),
        x_text=binary_size,
        y_text=lambda tick: units.trimmed(text(tick)),
        title=title,
        x_title="Size of the vector",
        about=f"{title} over size {where}. The table below says the same.",
    )
