"""``Benchmark``: who was measured, how long it took, and the figures derived from that."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import ClassVar

from syncline.comm.collectives import PROGRAMS, Collective
from syncline.errors import UserError, quoted, require_known
from syncline.plan.document import Document, Value
from syncline.plan.quantities import LARGEST_BYTES, require_finite, require_time

OURS = "syncline"  # a Syncline group that chooses the algorithm itself
TORCH = "torch"  # ``torch.distributed`` with backend ``syncline``
GLOO = "gloo"  # ``torch.distributed`` with backend ``gloo``
UCX = "ucx"  # a Syncline group over UCX
COPY = "memcpy"  # no collective: every rank copies a vector
STREAM = "stream"  # no collective: every rank sends the collective's bytes over plain TCP
PLAIN = (COPY, STREAM)
MPIS = ("open-mpi", "mpich")
PREFIX = f"{OURS}:"  # precedes the name of a forced algorithm


def all_contestants(collective: Collective) -> tuple[str, ...]:
    """Return all contestants of a collective, in the order of the table."""
    forced = (PREFIX + algorithm for algorithm in PROGRAMS[collective])
    return (OURS, TORCH, GLOO, UCX, *MPIS, *forced, *PLAIN)


def require_contestants(collective: Collective, names: Sequence[str]) -> None:
    """Raise a UserError if the collective has no such contestant, or if one is named twice."""
    known = all_contestants(collective)
    for index, name in enumerate(names):
        require_known(f"{collective} contestant", name, known)
        if name in names[:index]:
            raise UserError(f"{name!r} would run twice; name each contestant once")


def times_faster(rounds_s: Sequence[float], other_s: Sequence[float]) -> float:
    """Return how many times faster one is: the median over the rounds of other over own time."""
    return median(other / mine for mine, other in zip(rounds_s, other_s, strict=True))


class CollectiveTimes(Value, frozen=True, kw_only=True):
    """The times of one contestant for one size."""

    contestant: str
    workers: int
    size_bytes: int
    iterations: int
    rounds_s: tuple[float, ...]  # in each round: seconds of one operation, of the slowest rank
    cpu_s: tuple[float, ...]  # in each round: CPU seconds of one operation, all ranks together

    def __post_init__(self) -> None:
        where = f"benchmark of {quoted(self.contestant)}, {self.size_bytes} bytes"
        if not self.rounds_s or len(self.rounds_s) != len(self.cpu_s):
            raise UserError(
                f"{where}: expected times and CPU seconds of as many rounds, found "
                f"{len(self.rounds_s)} and {len(self.cpu_s)}"
            )
        if self.workers < 2 or self.size_bytes < 1 or self.iterations < 1:
            raise UserError(f"{where}: expected 2 workers, 1 byte and 1 iteration, or more")
        if max(self.workers, self.size_bytes) > LARGEST_BYTES:
            raise UserError(f"{where}: expected at most {LARGEST_BYTES} bytes and workers")
        for seconds in (*self.rounds_s, *self.cpu_s):
            require_time(where, seconds)
        if min(self.rounds_s) <= 0:
            raise UserError(f"{where}: times must be above 0 s, found {min(self.rounds_s):g}")

    @property
    def latency_s(self) -> float:
        """Median over the rounds."""
        return median(self.rounds_s)

    @property
    def spread_s(self) -> tuple[float, float]:
        """The fastest and the slowest round."""
        return min(self.rounds_s), max(self.rounds_s)

    @property
    def cpu_median_s(self) -> float:
        """Median over the rounds of the CPU seconds of an operation."""
        return median(self.cpu_s)

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Size over time."""
        return self.size_bytes / self.latency_s

    def times_faster_than(self, other: CollectiveTimes) -> float:
        """Return :func:`times_faster` for this and another contestant."""
        return times_faster(self.rounds_s, other.rounds_s)


class Absent(Value, frozen=True, kw_only=True):
    """A contestant that was asked for and did not take part."""

    contestant: str
    workers: int
    reason: str


class Benchmark(Document, frozen=True, kw_only=True):
    """What a benchmark of one collective in one place measured."""

    KIND: ClassVar[str] = "collectives"
    VERSION: ClassVar[int] = 1

    collective: Collective
    place: str  # in words
    rate_bytes_per_s: float | None = None
    machine: str
    versions: dict[str, str]
    entries: tuple[CollectiveTimes, ...]  # by worker count, size and contestant, as asked for
    absent: tuple[Absent, ...] = ()

    def __post_init__(self) -> None:
        if not self.entries:
            raise UserError("benchmark: no entries")
        if len({len(entry.rounds_s) for entry in self.entries}) > 1:
            raise UserError("benchmark: entries were measured in different numbers of rounds")
        if self.rate_bytes_per_s is not None:
            require_finite("benchmark: rate_bytes_per_s", self.rate_bytes_per_s, above_0=True)

    @property
    def rounds(self) -> int:
        """How often everything was measured."""
        return len(self.entries[0].rounds_s)

    @property
    def worker_counts(self) -> tuple[int, ...]:
        """Worker counts that were measured, in the order of the entries."""
        return tuple(dict.fromkeys(entry.workers for entry in self.entries))

    def of(self, contestant: str, workers: int, size_bytes: int) -> CollectiveTimes | None:
        """Return one entry, or None if that was not measured."""
        wanted = contestant, workers, size_bytes
        return next(
            (e for e in self.entries if (e.contestant, e.workers, e.size_bytes) == wanted), None
        )

    def bus_bytes_per_s(self, entry: CollectiveTimes) -> float:
        """Return the bus bandwidth; of a copy, the bytes that a rank copies in a second."""
        if entry.contestant == COPY:
            return entry.algorithm_bytes_per_s
        return entry.algorithm_bytes_per_s * bus_factor(self.collective, entry.workers)

    def of_bound(self, entry: CollectiveTimes) -> float | None:
        """Return the bus bandwidth as a share of what the hardware can do.

        That is the rate of the links or, without one, the speed at which every rank copies a vector
        of the same size when all do so at once. None if neither is known.
        """
        own = self.bus_bytes_per_s(entry)
        if self.rate_bytes_per_s is not None:
            return None if entry.contestant == COPY else own / self.rate_bytes_per_s
        copy = self.of(COPY, entry.workers, entry.size_bytes)
        return None if copy is None else own / copy.algorithm_bytes_per_s


ELEMENT_BYTES = 4  # all contestants exchange 32-bit floating point


def bus_factor(collective: Collective, workers: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth (size over time).

    The busiest direction of a rank's link carries at least this many times the vector. So the
    bus bandwidth can be compared with the speed of the hardware for any number of ranks.

    Source: nccl-tests, PERFORMANCE.md.
    """
    if collective == "all-reduce":
        return 2 * (workers - 1) / workers
    if collective in ("reduce-scatter", "all-gather"):
        return (workers - 1) / workers
    return 1.0


def whole_size(collective: Collective, workers: int, size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up to whole elements, and to equal shards of the ranks."""
    shards = workers if collective in ("reduce-scatter", "all-gather") else 1
    unit = ELEMENT_BYTES * shards
    return -(-size_bytes // unit) * unit
