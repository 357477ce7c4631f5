"""Running the cells of ``step_time``: turn by turn, kept as they come."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.common import median
from benchmarks.step_cells import (
    NOMINAL_RATE,
    OURS,
    SHARDED,
    TITLES,
    WIRES,
    Cell,
    planner_of,
    wire_of,
)
from benchmarks.step_jobs import probe_cell, race_cell
from benchmarks.step_report import print_cell, summary
from benchmarks.step_results import Forecast, Measured, Results, Turn, median_s, save, today
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planner_named
from syncline.plan.planners.compressed import compressed, planned_in
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.decoupled import in_equal_parts
from syncline.plan.profile import Profile
from syncline.plan.recipe import Rounded
from syncline.plan.simulator.contention import Measured as Trained
from syncline.plan.simulator.contention import corrected_by_baseline, fit_contention
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.transformations import with_sharding
from syncline.train.trials import CALIBRATION_PARTS

__all__ = ["Race", "networks_of", "planned", "spoken"]

TURN_S = 1.0
"""What a turn takes beside its iterations. This and what follows is for saying how long all takes,
before anything is known."""
JOB_S = 12.0
"""What starting the processes of a job takes."""
HIDDEN_BY_OURS, HIDDEN_BY_PEERS = 0.4, 0.2
REACHED_AT_HIGH_RATES = 0.5
EXPLORING_ROUNDS = 3
LONG_S = 5.0
"""Iterations of this length scatter so little that one exploring round tells their time."""
MOST_FAILURES = 2
"""Times that a contestant may fail in a cell; a failure may also be an accident."""
PREDICTED = (Ddp.NAME, *OURS)


class Race:
    """Measures cells and keeps the results."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        contestants: list[str],
        python: str,
        results: Results,
        path: Path,
        console: Console,
    ) -> None:
        self._console = console
        self._arguments = arguments
        self._contestants = contestants
        self._python = python
        self._path = path
        self._until_s = (
            None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
        )
        self.results = results

    def is_over(self) -> bool:
        """Whether the time that the run was given is up."""
        return self._until_s is not None and time.monotonic() >= self._until_s

    def turns_left(self, measured: Measured | None) -> list[tuple[str, int]]:
        """Return contestant and round of the turns to come, each round begun by another one."""
        left = []
        for number in range(self._arguments.rounds):
            first = number % len(self._contestants) if self._contestants else 0
            for name in (*self._contestants[first:], *self._contestants[:first]):
                taken = () if measured is None else measured.turns.get(name, ())
                failed = measured is not None and name in measured.failed
                if not failed and number not in {turn.round for turn in taken}:
                    left.append((name, number))
        return left

    def expected_s(self, cell: Cell) -> float:
        """Return how long a cell should take, by what is known of it."""
        measured = self.results.of(cell)
        turns = self.turns_left(measured)
        return JOB_S + sum(self._turn_s(cell, measured, name) for name, _ in turns)

    def _turn_s(self, cell: Cell, measured: Measured | None, name: str) -> float:
        if measured is not None and measured.turns.get(name):
            return float(median([turn.wall_s for turn in measured.turns[name]]))
        if measured is not None and name in measured.forecasts:
            iteration_s = measured.forecasts[name].iteration_s
        else:
            # Between hiding everything and hiding nothing; and this is a machine of few cores.
            reached = 1.0 if cell.rate == NOMINAL_RATE else REACHED_AT_HIGH_RATES
            whole_s = cell.ring_s / reached
            hidden = HIDDEN_BY_OURS if name in OURS else HIDDEN_BY_PEERS
            iteration_s = (1 - hidden) * (cell.profile().computation_s + whole_s)
        iterations: int = self._arguments.iterations + self._arguments.warmup
        if name in OURS:
            iterations *= 2  # until the plan runs, it trains for about as many again
        return TURN_S + iterations * iteration_s

    def run(self, cell: Cell) -> None:
        """Measure what is left of a cell."""
        measured = self._begin(cell)
        profile = cell.profile(update_s=measured.update_s)
        if not measured.forecasts:
            measured = self._explored(measured, profile)
        plans, forecasts = planned(profile, networks_of(measured, profile), PREDICTED)
        self._keep(msgspec.structs.replace(measured, forecasts=forecasts))
        self._console.print(f"  {summary(measured)}", highlight=False)
        failures: dict[str, int] = {}
        while not self.is_over():
            measured = self._of(cell)
            # What has failed comes last, so that the others are measured in any case.
            turns = sorted(self.turns_left(measured), key=lambda turn: failures.get(turn[0], 0))
            if not turns:
                break
            ended = race_cell(
                cell,
                turns,
                {name: plans[name] for name in OURS if name in self._contestants},
                python=self._python,
                iterations=self._arguments.iterations,
                warmup=self._arguments.warmup,
                seconds=None if self._until_s is None else self._until_s - time.monotonic(),
                expected_s=self._expecting(cell),
                turn=lambda name, turn: self._take(cell, name, turn),
            )
            if ended.reason:
                self._failed(cell, ended.contestant, ended.reason, failures)
        print_cell(self._console, self._of(cell), self.results.absent)

    def _begin(self, cell: Cell) -> Measured:
        """Return what is known of a cell, after probing its network where that was not done."""
        settings = (self._arguments.iterations, self._arguments.warmup)
        measured = self.results.of(cell)
        if measured is not None and (measured.iterations, measured.warmup) == settings:
            return measured
        found = probe_cell(cell, self._python)
        return Measured(
            model=cell.model,
            workers=cell.workers,
            rate=cell.rate,
            clip=cell.clip,
            scaled=cell.scaled,
            computation_given_s=cell.computation_s,
            adamw=cell.adamw,
            date=today(),
            iterations=self._arguments.iterations,
            warmup=self._arguments.warmup,
            computation_s=cell.profile().computation_s,
            all_reduce_s=found.all_reduce_s,
            update_s=found.update_s,
            network=found.network,
            forecasts={},
        )

    def _explored(self, measured: Measured, profile: Profile) -> Measured:
        """Return a cell with its network as it is in a training, which a run of `train` measures.

        Computing is emulated, so messages do not slow it. But what is not emulated, such as the
        copies and casts of gradients, may slow messages where hosts share cores. DDP shows this for
        the reducer's messages; plans of few and of many parts show it for the engine's, in each
        contestant's type.
        """
        stock = Ddp().plan(profile, measured.network)
        wires = dict.fromkeys((None, *(wire_of(n) for n in self._contestants if n in OURS)))
        plans = {
            plan.planner: plan
            for wire in wires
            for plan in calibration_plans(profile, measured.network, wire)
        }
        explored: dict[str, tuple[Turn, ...]] = dict.fromkeys((Ddp.NAME, *plans), ())
        rounds = 1 if measured.cell.ring_s > LONG_S else EXPLORING_ROUNDS

        def take(name: str, turn: Turn) -> None:
            explored[name] = (*explored[name], turn)

        ended = race_cell(
            measured.cell,
            [(name, number) for number in range(rounds) for name in explored],
            plans,
            python=self._python,
            iterations=self._arguments.iterations,
            warmup=self._arguments.warmup,
            seconds=None,
            expected_s=lambda name: self._turn_s(measured.cell, measured, name),
            turn=take,
        )
        if ended.reason:
            raise SystemExit(f"error: {measured.cell}: {ended.contestant} failed: {ended.reason}")
        own = Trained(stock, median_s(explored[Ddp.NAME]), slowdown_s=0.0)
        _, network, own = corrected_by_baseline(own, profile, measured.network)
        measured = msgspec.structs.replace(measured, network=network, explored=explored)
        network = fit_contention(profile, network, [own, *_calibrated(measured, profile, None)])
        return msgspec.structs.replace(measured, network=network)

    def _expecting(self, cell: Cell) -> Callable[[str], float]:
        measured = self._of(cell)
        return lambda name: self._turn_s(cell, measured, name)

    def _take(self, cell: Cell, name: str, turn: Turn) -> None:
        measured = self._of(cell).with_turn(name, turn)
        self._keep(measured)
        left_s = self.expected_s(cell) - JOB_S
        self._console.print(
            f"  round {turn.round + 1}  {TITLES[name]:24} {turn.iteration_s:8.3f} s "
            f"({turn.iteration_s / measured.bound_s:.3f} of the bound)  "
            f"{spoken(left_s)} left in this cell",
            highlight=False,
        )

    def _failed(self, cell: Cell, name: str | None, reason: str, failures: dict[str, int]) -> None:
        if name is None:
            raise SystemExit(f"error: {cell}: no contestant's turn, but the job failed: {reason}")
        failures[name] = failures.get(name, 0) + 1
        self._console.print(f"  {TITLES[name]} failed: {reason}", markup=False)
        if failures[name] >= MOST_FAILURES:
            self._keep(self._of(cell).with_failure(name, reason))

    def _of(self, cell: Cell) -> Measured:
        measured = self.results.of(cell)
        assert measured is not None
        return measured

    def _keep(self, measured: Measured) -> None:
        self.results = self.results.with_cell(measured)
        command = " ".join(["python -m benchmarks.step_time", *sys.argv[1:]])
        save(self._path, self.results, command)


def calibration_plans(profile: Profile, network: Network, wire: Rounded | None) -> list[Plan]:
    """Return the plans under which a training measures the engine before it tries its own."""
    plans = (in_equal_parts(profile, network, parts) for parts in CALIBRATION_PARTS)
    return [plan if wire is None else compressed(plan, wire) for plan in plans]


def _calibrated(measured: Measured, profile: Profile, wire: Rounded | None) -> list[Trained]:
    """Return how long a cell took under the plans of :func:`calibration_plans`, if it ran them."""
    plans = calibration_plans(profile, measured.network, wire)
    times = {name: median_s(turns) for name, turns in measured.explored.items()}
    return [
        Trained(plan, times[plan.planner], slowdown_s=0.0)
        for plan in plans
        if plan.planner in times
    ]


def networks_of(measured: Measured, profile: Profile) -> dict[Rounded | None, Network]:
    """Return a cell's network as the engine finds it, by the type in which gradients travel."""
    networks: dict[Rounded | None, Network] = {None: measured.network}
    for wire in WIRES.values():
        if found := _calibrated(measured, profile, wire):
            networks[wire] = fit_contention(profile, measured.network, found)
    return networks


def planned(
    profile: Profile, networks: Mapping[Rounded | None, Network], names: tuple[str, ...]
) -> tuple[dict[str, Plan], dict[str, Forecast]]:
    """Return the plan of each planner, and what it is predicted to take.

    ``networks`` are those of :func:`networks_of`; that of None also serves types that were not
    calibrated. Plans are made for the network as it was probed. Where hosts share cores, what slows
    messages is their number, which a factor does not tell a planner.
    """
    plans, forecasts = {}, {}
    for name in names:
        planner = planner_named(planner_of(name))
        wire = wire_of(name)
        network = networks.get(wire, networks[None])
        probed = msgspec.structs.replace(network, contention=Contention(), contention_by_need=None)
        given = with_sharding(profile, network.workers) if name.endswith(SHARDED) else profile
        plan = None if wire is None else planned_in(planner, given, probed, wire)
        plan = plans[name] = plan or planner.plan(given, probed)
        prediction = predict(given, network, plan).prediction
        forecasts[name] = Forecast(
            messages=prediction.messages,
            iteration_s=prediction.iteration_s,
            communication_s=prediction.communication_s,
            lower_bound_s=prediction.lower_bound_s,
        )
    return plans, forecasts


def spoken(seconds: float) -> str:
    """Return a duration as one says it, such as ``"1 h 05 min"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
