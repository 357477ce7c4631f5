"""``Workers``: how fast each worker computes, where they are not all alike."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UserError
from syncline.plan.document import Value

SLOWEST = 1000.0  # largest factor by which a worker may be slower, or faster


class WorkerClass(NamedTuple):
    """Workers that take exactly the same time; only one of them is simulated."""

    factor: float
    size: int  # how many there are
    first: int  # rank of the first of them


class Workers(Value, frozen=True, kw_only=True):
    """Factors on the computing time of each worker, fixed or drawn from a seeded distribution."""

    stragglers: tuple[tuple[int, float], ...] = ()
    """(rank, factor): this worker computes ``factor`` times as long."""
    spread: float = 0.0
    """Standard deviation of the logarithm of a factor drawn once for each worker (log-normal with
    median 1): 0.1 for workers that differ by about 10 %."""
    jitter: float = 0.0  # the same, drawn anew for each worker and iteration
    seed: int = 0

    def __post_init__(self) -> None:
        for rank, factor in self.stragglers:
            if rank < 0:
                raise UserError(f"workers: a rank must be at least 0, found {rank}")
            if not 1 / SLOWEST <= factor <= SLOWEST:
                raise UserError(
                    f"workers: the factor of rank {rank} must be between {1 / SLOWEST:g} and "
                    f"{SLOWEST:g}, found {factor}"
                )
        for field in ("spread", "jitter"):
            value = getattr(self, field)
            if not (math.isfinite(value) and 0 <= value <= 2):
                raise UserError(f"workers: {field} must be between 0 and 2, found {value}")

    def factors(self, count: int) -> NDArray[np.float64]:
        """Return the factor of each of ``count`` workers; raise UserError for other ranks."""
        factors = np.ones(count)
        if self.spread:
            factors = np.exp(np.random.default_rng(self.seed).normal(0, self.spread, count))
        for rank, factor in self.stragglers:
            if rank >= count:
                raise UserError(f"workers: no rank {rank} among {count} workers (0 to {count - 1})")
            factors[rank] *= factor
        return factors

    def classes(self, count: int) -> list[WorkerClass]:
        """Return the classes of workers with equal factors; with jitter, one for each worker."""
        if self.jitter:
            return [WorkerClass(f, 1, rank) for rank, f in enumerate(self.factors(count).tolist())]
        if not (self.stragglers or self.spread):
            return [WorkerClass(1.0, count, 0)]
        values, first, sizes = np.unique(self.factors(count), return_index=True, return_counts=True)
        rows = zip(values.tolist(), sizes.tolist(), first.tolist(), strict=True)
        return [WorkerClass(*row) for row in rows]

    def draws(self, classes: Sequence[WorkerClass], iterations: int) -> NDArray[np.float64]:
        """Return the factors of each iteration and class, shape ``(iterations, classes)``."""
        factors = np.array([c.factor for c in classes])
        table = np.broadcast_to(factors, (iterations, len(classes)))
        if not self.jitter:
            return table
        # A separate random stream, drawn row by row: more iterations do not change the first ones.
        generator = np.random.default_rng([self.seed, 1])
        return table * np.exp(generator.normal(0, self.jitter, (iterations, len(classes))))


ALIKE = Workers()  # all workers compute alike


def parse_stragglers(text: str) -> tuple[tuple[int, float], ...]:
    """Return the (rank, factor) pairs of a text such as ``"1.2@3,2@0"``, or raise UserError."""
    pairs = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*@\s*(\d+)\s*", part)
        if match is None:
            raise UserError(
                f"straggler {part.strip()!r}: expected FACTOR@RANK, such as 1.2@3 for rank 3 "
                "computing 1.2 times as long"
            )
        pairs.append((int(match[2]), float(match[1])))
    return tuple(pairs)
