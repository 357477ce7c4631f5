"""The picture of ``benchmarks.collectives``: a row a benchmark, a panel a worker count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from syncline.bench.result import Benchmark

COLOURS = {
    "syncline": "#b8421a",
    "zero-copy": "#866a00",
    "torch": "#d98c5f",
    "gloo": "#2b62a8",
    "open-mpi": "#3d7d3f",
    "mpich": "#8446a8",
    "memcpy": "#999999",
}


def draw(measured: Sequence[Benchmark], path: Path) -> None:
    """Draw the latency over the size of every all-reduce, with the range of the rounds."""
    panels = [(b, p) for b in measured if b.collective == "all-reduce" for p in b.worker_counts]
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.2 * columns, 3.9 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (benchmark, workers) in zip(axes.flat, panels, strict=False):
        for name, colour in COLOURS.items():
            mine = [e for e in benchmark.entries if (e.contestant, e.workers) == (name, workers)]
            if not mine:
                continue
            sizes = [e.size_bytes for e in mine]
            axis.plot(sizes, [e.latency_s for e in mine], "o-", ms=3, color=colour, label=name)
            low, high = zip(*(e.spread_s for e in mine), strict=True)
            axis.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("bytes")
        axis.set_ylabel("seconds")
        axis.set_title(f"all-reduce, P = {workers}\n{benchmark.place}", fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
