"""Collectives of Syncline beside Gloo's, Open MPI's and MPICH's, and the targets for them.

Every collective on shared memory; those of training over loopback TCP and between emulated hosts at
1 and 10 Gbit/s, beside UCX and a plain stream as well. docs/bench-collectives.md says what each
figure means.
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
from syncline.lab.bench.request import LEAST_ROUNDS, BenchmarkRequest, Local, parse_sizes
from syncline.lab.bench.result import (
    COPY,
    GLOO,
    MPIS,
    OURS,
    STREAM,
    TORCH,
    UCX,
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
    "ucx": "#c9a227",
    "stream": "#555555",
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
TRAINING: tuple[Collective, ...] = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")
TCP_SIZES = "4,4KiB,64KiB,1MiB,16MiB"
HOSTS = (2, 3, 4, 8)
CONTESTANTS = (OURS, TORCH, GLOO, *MPIS, COPY)
TCP_CONTESTANTS = (OURS, GLOO, UCX, MPIS[0], STREAM)
TCP_ROUNDS = 7
KIB, MIB = 1 << 10, 1 << 20
SMALL_BYTES = 65 * KIB  # sizes are rounded up to whole elements of all ranks
LINK_LIMITS = 0.9  # share of the links' rate that a plain stream reaches where they are the limit


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
            "measured": [msgspec.to_builtins(one) for one in measured],
            "targets": [
                {"collective": b.collective, "place": b.place, **each._asdict(), "met": each.met}
                for b in measured
                for each in targets(b)
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
        for collective in TRAINING:
            sizes = f"{TCP_SIZES},256MiB" if collective == "all-reduce" else TCP_SIZES
            yield _request(collective, sizes, workers, "tcp")
    for rate in ("1gbit", "10gbit"):
        if rate in places:
            for hosts in HOSTS:
                cluster = Cluster.of(hosts=hosts, rate=rate)
                for collective in TRAINING:
                    yield _request(collective, TCP_SIZES, (hosts,), cluster)


def _request(
    collective: Collective, sizes: str, workers: tuple[int, ...], place: Local | Cluster
) -> BenchmarkRequest:
    return BenchmarkRequest(
        collective=collective,
        sizes_bytes=parse_sizes(sizes),
        workers=workers,
        place=place,
        contestants=CONTESTANTS if place == "shared" else TCP_CONTESTANTS,
        rounds=LEAST_ROUNDS if place == "shared" else TCP_ROUNDS,
    )


def targets(benchmark: Benchmark) -> Iterator[Checked]:
    """Yield the targets that apply, with what was measured."""
    for ours in benchmark.entries:
        if ours.contestant == OURS:
            if benchmark.place == "one host, shared memory":
                yield from _times_as_fast(benchmark, ours, _against_gloo(ours.size_bytes))
            else:
                yield from _between_hosts(benchmark, ours)


def _times_as_fast(
    benchmark: Benchmark, ours: CollectiveTimes, against_gloo: float
) -> Iterator[Checked]:
    for name in (GLOO, *MPIS):
        other = benchmark.of(name, ours.workers, ours.size_bytes)
        if other is not None:
            target = against_gloo if name == GLOO else 1.0
            found = ours.times_faster_than(other)
            yield Checked(f"times as fast as {name}, {_where(ours)}", target, found)


def _against_gloo(size_bytes: int) -> float:
    if 4 * KIB <= size_bytes <= 64 * KIB:
        return 20.0
    if size_bytes == MIB:
        return 5.0
    return 2.5 if 16 * MIB <= size_bytes <= 64 * MIB else 1.0


def _between_hosts(benchmark: Benchmark, ours: CollectiveTimes) -> Iterator[Checked]:
    stream = benchmark.of(STREAM, ours.workers, ours.size_bytes)
    if stream is None:
        return
    yield Checked(f"of a plain stream, {_where(ours)}", 0.85, ours.times_faster_than(stream))
    target = 1.2 if ours.size_bytes <= SMALL_BYTES else 1.1
    share, most = benchmark.of_bound(ours), benchmark.of_bound(stream)
    if ours.size_bytes > SMALL_BYTES and share is not None and most is not None:
        at_1_gbit = benchmark.rate_bytes_per_s == 1e9 / 8
        if at_1_gbit or most >= LINK_LIMITS:
            yield Checked(f"of the ring bound at the links' rate, {_where(ours)}", 0.98, share)
        if most >= LINK_LIMITS:
            target = 1.0
    yield from _times_as_fast(benchmark, ours, target)
    if share is not None and ours.size_bytes == 4 * KIB and ours.workers == 4:
        yield Checked(f"0.5 ms over the latency, {_where(ours)}", 1.0, 0.5e-3 / ours.latency_s)


def _where(entry: CollectiveTimes) -> str:
    return f"{binary_size(entry.size_bytes)}, P = {entry.workers}"


if __name__ == "__main__":
    main()
