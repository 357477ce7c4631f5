"""Collectives of Syncline beside Gloo's, Open MPI's and MPICH's, and the targets for them.

With 2, 3 and 4 workers: every collective on shared memory, and all-reduce on loopback TCP and on
emulated hosts at 1 and 10 Gbit/s. docs/bench-collectives.md says what each figure means.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import msgspec
from matplotlib import pyplot as plt

from benchmarks.common import RESULTS, save
from syncline.comm.collectives import PROGRAMS, Collective
from syncline.lab.bench.collectives import measure_collectives
from syncline.lab.bench.page import binary_size
from syncline.lab.bench.request import BenchmarkRequest, Local, parse_sizes
from syncline.lab.bench.result import (
    COPY,
    GLOO,
    MPIS,
    OURS,
    TORCH,
    Benchmark,
    CollectiveTimes,
)
from syncline.lab.testbed import Cluster

mpl.use("Agg")


COLOURS = {
    "syncline": "#b8421a",
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


SIZES = "4,256,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
QUICK_SIZES = "4,4KiB,16KiB,64KiB,1MiB,4MiB,16MiB,64MiB"
OTHER_SIZES = "4KiB,64KiB,1MiB,16MiB"
TCP_SIZES = "4,4KiB,64KiB,1MiB,16MiB"
LINE_SIZES = "4KiB,64KiB,1MiB,16MiB"
CONTESTANTS = (OURS, TORCH, GLOO, *MPIS, COPY)
KIB, MIB = 1 << 10, 1 << 20


class Checked(NamedTuple):
    """A target beside what was measured."""

    what: str
    target: float
    found: float

    @property
    def met(self) -> bool:
        """Whether what was found is enough."""
        return self.found >= self.target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer sizes, all-reduce only")
    parser.add_argument("--places", default="shared,tcp,1gbit,10gbit")
    parser.add_argument("--name", default="collectives", help="of the results and the picture")
    arguments = parser.parse_args()
    measured = []
    for request in requests(arguments.places.split(","), quick=arguments.quick):
        benchmark = measure_collectives(request)
        measured.append(benchmark)
        print(f"{benchmark.collective} on {benchmark.place}", flush=True)
        for checked in targets(benchmark):
            word = "met   " if checked.met else "MISSED"
            print(
                f"  {word} {checked.found:8.3f} of {checked.target:<5g} {checked.what}", flush=True
            )
        for absent in benchmark.absent:
            print(f"  absent: {absent.contestant} ({absent.workers} workers): {absent.reason}")
    record = {
        "settings": vars(arguments),
        "measured": [msgspec.to_builtins(benchmark) for benchmark in measured],
        "targets": [
            {"collective": b.collective, "place": b.place, **checked._asdict(), "met": checked.met}
            for b in measured
            for checked in targets(b)
        ],
    }
    save(arguments.name, record, module="collectives")
    picture = RESULTS / f"{arguments.name}.png"
    draw(measured, picture)
    print(f"picture: {picture.relative_to(Path.cwd())}")


def requests(places: list[str], *, quick: bool) -> Iterator[BenchmarkRequest]:
    """Yield what the standard set consists of."""
    workers = (2, 4) if quick else (2, 3, 4)
    if "shared" in places:
        yield _request("all-reduce", QUICK_SIZES if quick else SIZES, workers, "shared")
        for collective in PROGRAMS:
            if collective != "all-reduce" and not quick:
                yield _request(collective, OTHER_SIZES, workers, "shared")
    if "tcp" in places:
        yield _request("all-reduce", TCP_SIZES, workers, "tcp")
    for rate in ("1gbit", "10gbit"):
        for hosts in workers:
            if rate in places:
                cluster = Cluster.of(hosts=hosts, rate=rate)
                yield _request("all-reduce", LINE_SIZES, (hosts,), cluster)


def _request(
    collective: Collective, sizes: str, workers: tuple[int, ...], place: Local | Cluster
) -> BenchmarkRequest:
    return BenchmarkRequest(
        collective=collective,
        sizes_bytes=parse_sizes(sizes),
        workers=workers,
        place=place,
        contestants=CONTESTANTS,
    )


def targets(benchmark: Benchmark) -> Iterator[Checked]:
    """Yield the targets that apply, with what was measured."""
    for ours in benchmark.entries:
        if ours.contestant == OURS:
            yield from _against_others(benchmark, ours)
            if benchmark.rate_bytes_per_s == 1e9 / 8:
                yield from _on_the_line(benchmark, ours)


def _against_others(benchmark: Benchmark, ours: CollectiveTimes) -> Iterator[Checked]:
    for name in (GLOO, *MPIS):
        other = benchmark.of(name, ours.workers, ours.size_bytes)
        if other is not None:
            target = 1.0
            if name == GLOO and benchmark.place == "one host, shared memory":
                target = _against_gloo(ours.size_bytes)
            found = ours.times_faster_than(other)
            yield Checked(f"times as fast as {name}, {_where(ours)}", target, found)


def _against_gloo(size_bytes: int) -> float:
    if 4 * KIB <= size_bytes <= 64 * KIB:
        return 20.0
    if size_bytes == MIB:
        return 5.0
    return 2.5 if 16 * MIB <= size_bytes <= 64 * MIB else 1.0


def _on_the_line(benchmark: Benchmark, ours: CollectiveTimes) -> Iterator[Checked]:
    share = benchmark.of_bound(ours)
    if ours.size_bytes >= MIB and share is not None:
        yield Checked(f"of the ring bound at the links' rate, {_where(ours)}", 0.98, share)
    if ours.size_bytes == 4 * KIB and ours.workers == 4:
        yield Checked(f"0.5 ms over the latency, {_where(ours)}", 1.0, 0.5e-3 / ours.latency_s)


def _where(entry: CollectiveTimes) -> str:
    return f"{binary_size(entry.size_bytes)}, P = {entry.workers}"


if __name__ == "__main__":
    main()
