"""``Replay``: what a replay measured, beside what was predicted."""

from __future__ import annotations

from typing import ClassVar

from syncline.errors import UserError
from syncline.plan.document import Document, Value
from syncline.plan.plan import Wait
from syncline.plan.quantities import require_count, require_time
from syncline.train.measure.statistics import median


class PlanTimes(Value, frozen=True, kw_only=True):
    """One plan, measured and predicted."""

    planner: str
    messages: int
    in_flight: int
    wait: Wait
    predicted_s: float
    lower_bound_s: float  # the predicted time that no plan of its kind can undercut
    rounds_s: tuple[float, ...]  # by round: seconds an iteration, steady state, slowest rank
    settled_s: tuple[float, ...]  # the same, until messages left in flight are done, too
    idle_s: tuple[float, ...]  # by round: time an iteration that the device waited for messages
    iterations_s: tuple[tuple[float, ...], ...]  # in each round: every iteration of rank 0

    def __post_init__(self) -> None:
        where = f"replay of {self.planner!r}"
        for field in ("messages", "in_flight"):
            require_count(f"{where}: {field}", getattr(self, field))
        for field in ("predicted_s", "lower_bound_s"):
            require_time(f"{where}: {field}", getattr(self, field))
        rounds = len(self.rounds_s)
        if not rounds:
            raise UserError(f"{where}: no rounds")
        for field in ("rounds_s", "settled_s", "idle_s", "iterations_s"):
            values = getattr(self, field)
            if len(values) != rounds:
                raise UserError(
                    f"{where}: expected {field} of {rounds} rounds, found {len(values)}"
                )
            for value in values:
                for seconds in value if isinstance(value, tuple) else (value,):
                    require_time(f"{where}: {field}", seconds)
        if min(self.rounds_s) <= 0:
            raise UserError(f"{where}: times must be above 0 s, found {min(self.rounds_s):g}")

    @property
    def measured_s(self) -> float:
        """Median over the rounds of the seconds an iteration."""
        return median(self.rounds_s)

    @property
    def spread_s(self) -> tuple[float, float]:
        """The fastest and the slowest round."""
        return min(self.rounds_s), max(self.rounds_s)

    @property
    def exposed_s(self) -> float:
        """Median over the rounds of the time that the device stood still."""
        return median(self.idle_s)

    @property
    def error(self) -> float:
        """Relative error of the predicted against the measured time, signed."""
        return self.predicted_s / self.measured_s - 1

    @property
    def above_bound(self) -> float:
        """How far the measured time is above the lower bound, as a fraction of the bound."""
        return self.measured_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0

    def speed_up_over(self, other: PlanTimes) -> float:
        """Return how many times faster this is: the median over the rounds of other / own time."""
        return median([b / a for a, b in zip(self.rounds_s, other.rounds_s, strict=True)])


class Replay(Document, frozen=True, kw_only=True):
    """What a replay of one profile on one network measured."""

    KIND: ClassVar[str] = "replay"
    VERSION: ClassVar[int] = 1

    model: str
    cluster: str  # the emulated hosts and links, in words
    network: str  # name of the network that was planned for and predicted with
    workers: int
    machine: str
    warmup: int
    iterations: int
    computation_s: float
    gradient_bytes: int
    entries: tuple[PlanTimes, ...]  # in the order in which they were asked for
    notes: tuple[str, ...] = ()  # sentences on what reading the profile left out or assumed

    def __post_init__(self) -> None:
        for field in ("workers", "warmup", "iterations"):
            require_count(f"replay: {field}", getattr(self, field))
        require_time("replay: computation_s", self.computation_s)
        if not self.entries:
            raise UserError("replay: no entries")
        names = [entry.planner for entry in self.entries]
        if len(set(names)) < len(names):
            raise UserError(f"replay: a planner is named twice: {', '.join(names)}")
        if len({len(entry.rounds_s) for entry in self.entries}) > 1:
            raise UserError("replay: the planners were measured in different numbers of rounds")

    @property
    def rounds(self) -> int:
        """How often every plan was measured."""
        return len(self.entries[0].rounds_s)

    @property
    def best(self) -> PlanTimes:
        """The fastest, as measured."""
        return min(self.entries, key=lambda entry: entry.measured_s)

    @property
    def fastest_first(self) -> tuple[PlanTimes, ...]:
        """The entries, the fastest as measured first."""
        return tuple(sorted(self.entries, key=lambda entry: entry.measured_s))

    @property
    def lower_bound_s(self) -> float:
        """The smallest of the entries' lower bounds: none of these plans can undercut it."""
        return min(entry.lower_bound_s for entry in self.entries)

    def of(self, planner: str) -> PlanTimes | None:
        """Return the entry of a planner, or None if it was not asked for."""
        return next((entry for entry in self.entries if entry.planner == planner), None)
