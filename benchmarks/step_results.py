"""The raw results of ``step_time``: what was measured so far, cell by cell, in one JSON file."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import machine, median
from benchmarks.step_cells import Cell, wire_of
from syncline.errors import FileError
from syncline.plan.document import Value
from syncline.plan.files import write_atomically
from syncline.plan.network import Network
from syncline.plan.quantities import bytes_per_element
from syncline.train.measure.statistics import standard_error

__all__ = ["Forecast", "Measured", "Results", "Turn", "load", "median_s", "save", "today"]

FORM = 1
"""Of the file; a file of another form is not continued."""
SATURATED = 0.9
"""Share of the processor time above which hosts wait for cores more than for links. Under `overlap`
at 1 Gbit/s eight hosts use 0.93 to 0.96 of two cores, four use 0.60 to 0.66."""


class Turn(Value, frozen=True, kw_only=True):
    """One contestant's iterations in one round; see :class:`syncline.lab.replay.job.Lap`."""

    round: int
    iteration_s: float
    """Seconds an iteration in the steady state, of the slowest rank."""
    settled_s: float
    """The same, until everything is done."""
    idle_s: float
    """How long the device stood still an iteration, waiting for the exchange."""
    steps_s: tuple[float, ...]
    """Each iteration of rank 0."""
    wall_s: float
    """All of it: making the model, warming up, and the iterations."""
    busy: float | None = None
    """Share of the machine's processor time that was used meanwhile; None in older files."""
    peak_bytes: int | None = None
    """Resident memory that the turn added to what its process had; of the largest rank."""


def median_s(turns: Sequence[Turn]) -> float:
    """Return the median over turns, at least one, of the seconds an iteration."""
    return median([turn.iteration_s for turn in turns])


class Forecast(Value, frozen=True, kw_only=True):
    """What a plan was predicted to take, before it ran."""

    messages: int
    iteration_s: float
    communication_s: float
    lower_bound_s: float


class Measured(Value, frozen=True, kw_only=True):
    """One cell."""

    model: str
    workers: int
    rate: str
    date: str
    clip: bool = False
    scaled: bool = False
    computation_given_s: float | None = None
    """Where the computation was asked for, and does not follow from the rate."""
    adamw: bool = False
    iterations: int
    """That count, in every turn."""
    warmup: int
    """Iterations before those."""
    computation_s: float
    """Of one iteration, without communication; what is emulated, not measured."""
    all_reduce_s: tuple[float, ...]
    """Of one all-reduce of all gradients alone, by the slowest rank."""
    update_s: float = 0.0
    """What clipping, unscaling and AdamW take, of which nothing is emulated."""
    network: Network
    """As probed on these links, with what training does to messages."""
    forecasts: dict[str, Forecast]
    """By contestant."""
    explored: dict[str, tuple[Turn, ...]] = msgspec.field(default_factory=dict)
    """By plan, what they were predicted from."""
    turns: dict[str, tuple[Turn, ...]] = msgspec.field(default_factory=dict)
    """By contestant, in the order in which they ran."""
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    """Why a contestant has no more turns."""

    @property
    def cell(self) -> Cell:
        """Where this was measured."""
        return Cell(
            model=self.model,
            workers=self.workers,
            rate=self.rate,
            clip=self.clip,
            scaled=self.scaled,
            computation_s=self.computation_given_s,
            adamw=self.adamw,
        )

    @property
    def bound_s(self) -> float:
        """max(compute alone, one whole all-reduce alone)."""
        return self.bound_of("")

    def bound_of(self, contestant: str) -> float:
        """Return the bound of a contestant: in 16 bits half of the all-reduce, in 8 a quarter."""
        share = bytes_per_element(wire_of(contestant) or "float32") / bytes_per_element("float32")
        return max(self.computation_s, median(self.all_reduce_s) * share)

    @property
    def share_of_rate(self) -> float:
        """Of the links' rate, what an all-reduce of all gradients reaches."""
        return self.cell.ring_s / median(self.all_reduce_s)

    def times_s(self, contestant: str) -> list[float]:
        """Return the seconds an iteration of each turn; empty where there was none."""
        return [turn.iteration_s for turn in self.turns.get(contestant, ())]

    def iteration_s(self, contestant: str) -> float | None:
        """Return the median over the turns, or None where there was none."""
        turns = self.turns.get(contestant)
        return median_s(turns) if turns else None

    def is_saturated(self, contestant: str) -> bool:
        """Whether the hosts kept the cores that they share busy, so that these were the limit."""
        busy = [turn.busy for turn in self.turns.get(contestant, ()) if turn.busy is not None]
        return bool(busy) and median(busy) > SATURATED

    def noise_s(self, contestant: str) -> float:
        """Return the standard error of the median over the turns."""
        return standard_error(self.times_s(contestant))

    def prediction_error(self, contestant: str) -> float | None:
        """Return the relative error of the predicted against the measured time, signed."""
        measured_s = self.iteration_s(contestant)
        if measured_s is None or contestant not in self.forecasts:
            return None
        return self.forecasts[contestant].iteration_s / measured_s - 1

    def speed_ups(self, contestant: str, over: str) -> list[float]:
        """Return how many times faster it is than another, in each round that both have run.

        What disturbs a whole round disturbs no ratio.
        """
        others = {turn.round: turn.iteration_s for turn in self.turns.get(over, ())}
        return [
            others[turn.round] / turn.iteration_s
            for turn in self.turns.get(contestant, ())
            if turn.round in others
        ]

    def with_turn(self, contestant: str, turn: Turn) -> Measured:
        """Return this with one turn more."""
        turns = {**self.turns, contestant: (*self.turns.get(contestant, ()), turn)}
        return msgspec.structs.replace(self, turns=turns)

    def with_failure(self, contestant: str, reason: str) -> Measured:
        """Return this with a contestant out of the race."""
        return msgspec.structs.replace(self, failed={**self.failed, contestant: reason})


class Results(Value, frozen=True, kw_only=True):
    """The whole file."""

    benchmark: str = "step_time"
    form: int = FORM
    command: str = ""
    """Of the last run that added to it."""
    machine: dict[str, Any] = msgspec.field(default_factory=dict)
    absent: dict[str, str] = msgspec.field(default_factory=dict)
    """Contestants that could not be run at all, and why."""
    cells: tuple[Measured, ...] = ()

    def of(self, cell: Cell) -> Measured | None:
        """Return what is known about a cell, if anything."""
        return next((measured for measured in self.cells if measured.cell == cell), None)

    def with_cell(self, measured: Measured) -> Results:
        """Return this with a cell added or replaced."""
        others = [m for m in self.cells if m.cell != measured.cell]
        place = next((i for i, m in enumerate(self.cells) if m.cell == measured.cell), len(others))
        return msgspec.structs.replace(self, cells=(*others[:place], measured, *others[place:]))


def today() -> str:
    """Return the date that results are marked with."""
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


def load(path: Path) -> Results:
    """Return the results in a file; none where there is no such file.

    Raises:
        FileError: the file is no such results.
    """
    if not path.exists():
        return Results()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise FileError(
            f"{path}: no results of step_time ({error}); begin anew with --fresh"
        ) from None
    if found.form != FORM:
        raise FileError(
            f"{path}: results of form {found.form}, expected {FORM}; begin anew with --fresh"
        )
    return found


def save(path: Path, results: Results, command: str) -> None:
    """Write the results; a file that is there is replaced whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    # torch's version is a string of a class of its own.
    known = {k: str(v) if isinstance(v, str) else v for k, v in machine().items()}
    stamped = msgspec.structs.replace(results, command=command, machine=known)
    text = msgspec.json.format(msgspec.json.encode(stamped), indent=1).decode() + "\n"
    write_atomically(path, text)
