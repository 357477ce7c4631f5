"""What a benchmark is called, in the terminal and on the page."""

from __future__ import annotations

from syncline.bench.names import GLOO, MPIS, OURS
from syncline.bench.result import Benchmark, Entry
from syncline.report import units

__all__ = ["binary_size", "headline", "measured_how", "of_bound", "spread_text", "what_bound"]


def binary_size(size_bytes: int) -> str:
    """Return a size in powers of 1,024 where it is one: ``"64 KiB"``, ``"1.5 MiB"``, ``"12 B"``."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def headline(benchmark: Benchmark) -> str:
    """Return in a sentence, without its full stop, how Syncline does beside the nearest other."""
    ratios = [
        (min(ours.times_faster_than(other) for other in others), ours)
        for ours in benchmark.entries
        if ours.contestant == OURS
        and (
            others := [
                other
                for name in (GLOO, *MPIS)
                if (other := benchmark.of(name, ours.workers, ours.size_bytes)) is not None
            ]
        )
    ]
    what = f"{benchmark.collective} on {benchmark.place}"
    if not ratios:
        return what
    (worst, at), (best, most) = min(ratios, key=_first), max(ratios, key=_first)
    return (
        f"{what}: against the fastest other, Syncline is {worst:.2f} ({_where(at)}) to {best:.2f} "
        f"({_where(most)}) times as fast"
    )


def _first(pair: tuple[float, Entry]) -> float:
    return pair[0]


def _where(entry: Entry) -> str:
    return f"{binary_size(entry.size_bytes)}, {entry.workers} workers"


def measured_how(benchmark: Benchmark) -> str:
    """Return how the medians came about."""
    return f"medians of {units.counted(benchmark.rounds, 'round')}, in turns"


def spread_text(entry: Entry) -> str:
    """Return the fastest and the slowest round, such as ``"1.39 to 1.42 ms"``."""
    low, high = map(units.duration, entry.spread_s)
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def what_bound(benchmark: Benchmark) -> str:
    """Return what the bus bandwidth is compared with."""
    return "of memcpy" if benchmark.rate_bytes_per_s is None else "of line rate"


def of_bound(benchmark: Benchmark, entry: Entry) -> str:
    """Return the bus bandwidth as a share of the bound; empty where that is not known."""
    share = benchmark.of_bound(entry)
    return "" if share is None else units.percent(share)
