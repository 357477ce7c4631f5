"""A small benchmark, as if measured."""

from __future__ import annotations

from syncline.lab.bench.result import Absent, Benchmark, CollectiveTimes

ROUNDS = (1.0, 0.9, 1.1, 1.2, 0.95)


def entry(contestant: str, seconds: float, size_bytes: int, workers: int = 2) -> CollectiveTimes:
    return CollectiveTimes(
        contestant=contestant,
        workers=workers,
        size_bytes=size_bytes,
        iterations=10,
        rounds_s=tuple(seconds * share for share in ROUNDS),
        cpu_s=tuple(seconds * 2 for _ in ROUNDS),
    )


BENCHMARK = Benchmark(
    collective="all-reduce",
    place="one host, shared memory",
    machine="an imagined processor, 2 cores",
    versions={"torch": "torch 0"},
    entries=tuple(
        entry(name, seconds * factor, size_bytes)
        for size_bytes, factor in ((4, 1.0), (1 << 20, 100.0))
        for name, seconds in (("syncline", 5e-6), ("gloo", 100e-6), ("memcpy", 1e-6))
    ),
    absent=(Absent(contestant="mpich", workers=2, reason="not there <here>"),),
)
