"""``Trace``: the profile, plan and timeline read from a trace file, with notes on what is missing.

Every reader returns one, or raises a ``FileError`` that names the file and the place: the file
cannot be read, is of another format, broken or truncated, or a value is missing, negative or too
large. Formats differ in what they hold: a layer table has times of messages but no worker count, an
operator graph has no messages at all. ``notes`` lists what a reader left out or assumed, one
sentence each; they are shown with every trace.
"""

from __future__ import annotations

import heapq
import math
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from syncline.errors import UserError, quoted
from syncline.plan.fit import Fit, fit_cost_curve
from syncline.plan.network import Measurement, Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.quantities import LARGEST_BYTES, LONGEST_NS
from syncline.plan.timeline import Timeline

MOST_POINTS = 48  # most sizes that are fitted: a fit's time grows with their third power


class Trace(NamedTuple):
    """One training iteration as a trace describes it."""

    model: str
    profile: Profile | None
    """None if the trace does not hold enough for one; ``notes`` says what is missing."""
    points: tuple[Measurement, ...] = ()
    """Measured all-reduces: bytes and seconds; empty where the trace times none."""
    fit: Fit | None = None  # cost curve of messages; None: fitted to the points on demand
    workers: int | None = None
    """Workers that exchanged the messages; None where the trace does not say."""
    steps: int = 1  # iterations that the profile was averaged over, or chosen from
    plan: Plan | None = None  # the messages that were sent, where the trace holds them
    timeline: Timeline | None = None  # when everything ran, if the trace says so
    iteration_s: float | None = None  # median measured seconds of the steps, if the trace says so
    notes: tuple[str, ...] = ()  # what could not be recovered, and what was assumed

    def known_profile(self) -> Profile:
        """Return the profile; UserError if the trace does not hold enough for one."""
        if self.profile is None:
            # The note about the missing profile comes before other notes.
            notes = sorted(self.notes, key=lambda note: "no profile" not in note)
            why = "; ".join(notes) or "it holds a timeline only"
            raise UserError(f"{quoted(self.model)}: no profile can be made of this trace: {why}")
        return self.profile

    def network(self, workers: int | None = None) -> Network:
        """Return the network over which the timed messages were sent.

        ``workers`` replaces the worker count in the trace. Raise UserError if neither is known, or
        messages of fewer than two sizes were timed.
        """
        count = self.workers if workers is None else workers
        if count is None:
            raise UserError(
                f"{quoted(self.model)}: the trace does not say how many workers exchanged its "
                "messages; say it with --workers"
            )
        if not self.has_network:
            sizes = {point.size_bytes for point in self.points}
            raise UserError(
                f"{quoted(self.model)}: the trace times messages of {len(sizes)} different sizes, "
                "and a cost curve needs at least two; name a network file or a preset instead"
            )
        fit = self.fit or fit_cost_curve(self.points)
        return Network(
            name=f"as in {self.model}",
            workers=count,
            all_reduce=fit.curve,
            points=self.points,
            fit_error=fit.error,
            fit_error_max=fit.error_max,
        )

    @property
    def has_network(self) -> bool:
        """Whether messages of enough sizes were timed for a cost curve."""
        return len({point.size_bytes for point in self.points}) > 1


class Written(NamedTuple):
    """The content of a trace file that was made from a profile."""

    content: bytes
    lost: tuple[str, ...] = ()  # what the format cannot say, one sentence each


def model_of(path: str | os.PathLike[str]) -> str:
    """Return a name for a trace that names no model: its file's name up to the first dot."""
    return Path(path).name.split(".")[0]


def measured_points(samples: Iterable[tuple[int, float]]) -> tuple[Measurement, ...]:
    """Return the mean time of each size, smallest first, with its repetitions.

    Samples are bytes and seconds of single messages; those of 0 bytes or 0 s are left out. Of more
    than 48 sizes, neighbours on the logarithmic scale are merged.
    """
    times: dict[int, list[float]] = {}
    for size_bytes, time_s in samples:
        if size_bytes > 0 and time_s > 0:
            times.setdefault(size_bytes, []).append(time_s)
    if not times:
        return ()
    groups: dict[int, list[tuple[int, float]]] = {}
    smallest, largest = min(times), max(times)
    span = math.log(largest / smallest) or 1.0
    for place, size_bytes in enumerate(sorted(times)):
        if len(times) > MOST_POINTS:
            place = int(math.log(size_bytes / smallest) / span * (MOST_POINTS - 1))
        groups.setdefault(place, []).extend((size_bytes, time_s) for time_s in times[size_bytes])
    return tuple(
        Measurement(
            size_bytes=round(sum(size for size, _ in group) / len(group)),
            time_s=math.fsum(time_s for _, time_s in group) / len(group),
            repetitions=len(group),
        )
        for group in groups.values()
    )


def message_s(network: Network | None, size_bytes: int) -> float:
    """Return the seconds of an all-reduce, as measured or fitted; 0 without a network or bytes."""
    if network is None or not size_bytes:
        return 0.0
    measured = (point.time_s for point in network.points if point.size_bytes == size_bytes)
    return next(measured, network.all_reduce.seconds(size_bytes))


def sized_gradient(
    name: str, size_bytes: int, *, ready_after: int, needed_by: int | None = None
) -> Gradient:
    """Return a gradient of which only the bytes are known: float32 if they allow it, or float16."""
    if not 0 <= size_bytes <= LARGEST_BYTES:
        raise UserError(f"a gradient of {size_bytes} bytes is not possible")
    if size_bytes % 2:
        raise UserError(f"a gradient of {size_bytes} bytes is not a whole number of elements")
    width, dtype = (2, "float16") if size_bytes % 4 else (4, "float32")
    elements = size_bytes // width
    return Gradient(
        name=name, elements=elements, dtype=dtype, ready_after=ready_after, needed_by=needed_by
    )


def bare_profile(
    model: str,
    operations: Iterable[Operation],
    gradients: Iterable[Gradient],
    *,
    iterations: int = 1,
) -> Profile:
    """Return the profile of a trace without a device and a worker count: unknown, and 1."""
    return Profile(
        model=model,
        device="unknown",
        workers=1,
        iterations=iterations,
        operations=tuple(operations),
        gradients=tuple(gradients),
    )


def seconds_in(text: str, what: str, where: str, *, unit_s: float) -> float:
    """Read a time in units of ``unit_s`` seconds, at most as long as an iteration may take."""
    time_s = _number(text, what, where) * unit_s
    if time_s * 1e9 > LONGEST_NS:
        raise UserError(
            f"{where}: {what} is {time_s:.3g} s, longer than an iteration may take; the unit is "
            f"{unit_s:g} s"
        )
    return time_s


def bytes_in(text: str, what: str, where: str, *, whole: bool = True) -> int:
    """Read a number of bytes; a fraction is dropped unless they must be ``whole``."""
    size_bytes = _number(text, what, where)
    if size_bytes > LARGEST_BYTES:
        raise UserError(f"{where}: {what} is {text.strip()[:40]}, which is not possible")
    if whole and not size_bytes.is_integer():
        raise UserError(f"{where}: expected whole bytes as {what}, found {text.strip()[:40]}")
    return int(size_bytes)


def _number(text: str, what: str, where: str) -> float:
    shown = text.strip()[:40]
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{where}: expected a number as {what}, found {shown!r}") from None
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{where}: {what} must be finite and at least 0, found {shown}")
    return value


def unique_names(names: Iterable[str]) -> Iterator[str]:
    """Yield each name, with a number appended if it was yielded before."""
    seen: dict[str, int] = {}
    for name in names:
        candidate = name
        while candidate in seen:
            seen[name] += 1
            candidate = f"{name} #{seen[name]}"
        seen[candidate] = 1
        yield candidate


def in_order(count: int, inputs: Iterable[Iterable[int]]) -> list[int]:
    """Return nodes in topological order, ties as listed; nodes on or behind a cycle are left out.

    ``inputs`` gives, for each node, the indices of the nodes it waits for; they may repeat.
    O((n + m) log n) for n nodes and m inputs.
    """
    waiting = array("q", bytes(8 * count))
    followers: list[array[int]] = [array("q") for _ in range(count)]
    for index, own in enumerate(inputs):
        for before in own:
            followers[before].append(index)
            waiting[index] += 1
    free = [index for index, left in enumerate(waiting) if not left]
    order = []
    while free:
        index = heapq.heappop(free)
        order.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(free, follower)
    return order
