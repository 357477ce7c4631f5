"""``BenchmarkRequest`` and ``TuneRequest``: what to measure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from syncline.comm.collectives import PROGRAMS, Collective
from syncline.errors import UserError, require_known
from syncline.lab.bench.result import MPIS, require_contestants
from syncline.lab.testbed import Cluster
from syncline.plan.document import Value, described
from syncline.plan.quantities import require_finite

Local = Literal["shared", "tcp"]
PLACES: tuple[Local, ...] = ("shared", "tcp")
LEAST_ROUNDS = 5  # a median of fewer says little
LARGEST_BYTES = 1 << 30
MOST_LOCAL_WORKERS = 64
Lap = Annotated[float, described("Length of a turn.", "SECONDS")]


class _Request(Value, frozen=True, kw_only=True):
    sizes_bytes: tuple[int, ...]  # sizes of the whole vector
    workers: tuple[int, ...]
    place: Local | Cluster  # this host, by shared memory or by TCP, or emulated hosts
    rounds: int
    lap_s: Lap  # a turn repeats a collective for this long; one that takes longer is run once
    timeout_s: float

    def require_range(self, what: str, chosen: Sequence[str], *times: str) -> None:
        """Raise a UserError if nothing is chosen, or if a field is out of range."""
        if not chosen or not self.sizes_bytes or not self.workers:
            raise UserError(f"nothing to measure: name a {what}, a size and a worker count")
        for size_bytes in self.sizes_bytes:
            if not 1 <= size_bytes <= LARGEST_BYTES:
                raise UserError(
                    f"sizes must be from 1 to {LARGEST_BYTES:,} bytes, found {size_bytes:,}"
                )
        for workers in self.workers:
            if not 2 <= workers <= MOST_LOCAL_WORKERS:
                raise UserError(
                    f"a collective needs 2 to {MOST_LOCAL_WORKERS} workers, found {workers}"
                )
        if isinstance(self.place, Cluster) and self.workers != (self.place.workers,):
            raise UserError(
                f"the emulated cluster has {self.place.workers} workers, found "
                f"{', '.join(map(str, self.workers))}; leave the worker count out"
            )
        if self.rounds < LEAST_ROUNDS:
            raise UserError(f"rounds must be at least {LEAST_ROUNDS}, found {self.rounds}")
        for name in times:
            require_finite(name, getattr(self, name), above_0=True)


class BenchmarkRequest(_Request, frozen=True, kw_only=True):
    """What ``syncline bench`` measures."""

    collective: Collective
    contestants: tuple[str, ...]
    rounds: Annotated[int, described("Turns of every contestant.")] = LEAST_ROUNDS
    lap_s: Lap = 0.05
    timeout_s: Annotated[float, described("Give up when a turn takes longer.", "SECONDS")] = 300.0
    pythons: Mapping[str, Path] = {}  # MPI -> the interpreter that has its mpi4py

    def __post_init__(self) -> None:
        collective_named(self.collective)
        require_contestants(self.collective, self.contestants)
        self.require_range("contestant", self.contestants, "lap_s", "timeout_s")
        for name in self.pythons:
            require_known("MPI", name, MPIS)

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Rate of the slowest link, if the place has links of a given rate."""
        if not isinstance(self.place, Cluster):
            return None
        rates = [self.place.rate_of(host) for host in range(self.place.hosts)]
        return min((rate for rate in rates if rate is not None), default=None)


def name_of_place(place: Local | Cluster) -> str:
    """Return a place in words."""
    if isinstance(place, Cluster):
        return str(place)
    return "one host, shared memory" if place == "shared" else "one host, loopback TCP"


def collective_named(name: str) -> Collective:
    """Return the collective of a name, or raise a UserError."""
    name = name.strip()
    require_known("collective", name, PROGRAMS)
    return next(collective for collective in PROGRAMS if collective == name)


class TuneRequest(_Request, frozen=True, kw_only=True):
    """What ``syncline tune`` measures."""

    collectives: tuple[Collective, ...]
    rounds: Annotated[int, described("Turns of every algorithm.")] = 7
    lap_s: Lap = 0.02
    timeout_s: Annotated[float, described("Give up when a turn takes longer.", "SECONDS")] = 60.0
    deadline_s: Annotated[
        float,
        described(
            "Stop after this time; collectives not measured by then keep the built-in choice.",
            "SECONDS",
        ),
    ] = 900.0

    def __post_init__(self) -> None:
        for number, collective in enumerate(self.collectives):
            collective_named(collective)
            if collective in self.collectives[:number]:
                raise UserError(f"{collective!r} would be measured twice; name it once")
        self.require_range("collective", self.collectives, "lap_s", "timeout_s", "deadline_s")
        for name, values in (("size", self.sizes_bytes), ("worker count", self.workers)):
            if len(set(values)) < len(values):
                raise UserError(f"a {name} would be measured twice; name it once")


UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
STEP = 4  # factor from one size of a range to the next


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes of a list, in its order.

    ``4,64KiB,1MiB`` are three sizes. ``4..256MiB`` are 4, 16, 64 and so on, and 256 MiB itself.
    """
    sizes: list[int] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        first = _size(low, text)
        last = _size(high, text) if dots else first
        if not 0 < first <= last:
            raise UserError(f"sizes {text!r}: {part.strip()!r} does not go from low to high")
        while first < last:
            sizes.append(first)
            first *= STEP
        sizes.append(last)
    if len(set(sizes)) < len(sizes):
        raise UserError(f"sizes {text!r}: a size is named twice")
    return tuple(sizes)


def _size(part: str, text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*(B|KiB|MiB|GiB|)\s*", part)
    if match is None:
        raise UserError(
            f"sizes {text!r}: cannot read {part.strip()!r}; write 4, 64KiB or 4..256MiB"
        )
    return int(match[1]) * UNITS[match[2]]
