"""``Request``: what is to be measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from syncline.bench.names import MPIS, require_contestants
from syncline.collectives import PROGRAMS, Collective
from syncline.errors import UserError, did_you_mean
from syncline.testbed import Cluster

__all__ = ["PLACES", "Local", "Request"]

Local = Literal["shared", "tcp"]
PLACES: tuple[Local, ...] = ("shared", "tcp")
LEAST_ROUNDS = 5
"""Fewer make no median to speak of."""
LARGEST_BYTES = 1 << 30
MOST_LOCAL_WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be measured.

    Raises:
        UserError: on construction, for what is unknown or out of range.
    """

    collective: Collective
    sizes_bytes: tuple[int, ...]
    workers: tuple[int, ...]
    place: Local | Cluster
    """This host, by shared memory or by TCP, or emulated hosts."""
    contestants: tuple[str, ...]
    rounds: int = LEAST_ROUNDS
    lap_s: float = 0.05
    """How long a turn should take; a collective that takes longer is run once or a few times."""
    timeout_s: float = 300.0
    """For every turn."""
    pythons: Mapping[str, Path] = field(default_factory=dict)
    """Of each MPI: the interpreter that has its mpi4py."""

    def __post_init__(self) -> None:
        if self.collective not in PROGRAMS:
            raise UserError(
                f"unknown collective {self.collective!r}{did_you_mean(self.collective, PROGRAMS)} "
                f"(known: {', '.join(PROGRAMS)})"
            )
        require_contestants(self.collective, self.contestants)
        if not self.contestants or not self.sizes_bytes or not self.workers:
            raise UserError("nothing to measure: name a contestant, a size and a worker count")
        for size_bytes in self.sizes_bytes:
            if not 1 <= size_bytes <= LARGEST_BYTES:
                raise UserError(
                    f"sizes must be from 1 to {LARGEST_BYTES:,} bytes, found {size_bytes:,}"
                )
        most = MOST_LOCAL_WORKERS
        for workers in self.workers:
            if not 2 <= workers <= most:
                raise UserError(f"a collective needs 2 to {most} workers, found {workers}")
        if isinstance(self.place, Cluster) and self.workers != (self.place.workers,):
            raise UserError(
                f"the emulated cluster has {self.place.workers} workers, found "
                f"{', '.join(map(str, self.workers))}; leave the worker count out"
            )
        if self.rounds < LEAST_ROUNDS:
            raise UserError(f"rounds must be at least {LEAST_ROUNDS}, found {self.rounds}")
        for name in ("lap_s", "timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} must be a finite number above 0, found {value}")
        for name in self.pythons:
            if name not in MPIS:
                raise UserError(
                    f"unknown MPI {name!r}{did_you_mean(name, MPIS)} (known: {', '.join(MPIS)})"
                )

    @property
    def place_name(self) -> str:
        """The place in words."""
        if isinstance(self.place, Cluster):
            return str(self.place)
        return "one host, shared memory" if self.place == "shared" else "one host, loopback TCP"

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Of the slowest link, where the place has links of a given rate."""
        if not isinstance(self.place, Cluster):
            return None
        rates = [self.place.rate_of(host) for host in range(self.place.hosts)]
        return min((rate for rate in rates if rate is not None), default=None)
