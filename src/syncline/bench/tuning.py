"""Measuring which algorithm is fastest where: all of them in turns, on the group's own workers."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from syncline.bench.launch import Team, hosts_of, torch_team
from syncline.bench.messages import Order, Refused, Setup
from syncline.bench.names import OURS
from syncline.bench.request import TuneRequest, name_of_place, transport_of
from syncline.bench.result import whole_size
from syncline.bench.switch_points import built_in_candidate, candidates, regions_of
from syncline.collectives import Collective
from syncline.errors import InternalError, PeerError, UserError
from syncline.groups import Choice, Choices
from syncline.groups.choices import Region, Timing, release
from syncline.groups.site import Site
from syncline.processes import machine_name, run_folder
from syncline.workers import Progress

__all__ = ["Tuned", "race", "tune"]

TRIALS = (1, 10)
"""Most iterations of each turn before the first round. These turns give the number of iterations
that fill a turn, and rule out hopeless algorithms."""
MOST_ITERATIONS = 5000
WARM_SHARE = 0.1
"""Iterations before those measured, as a share of them."""
HOPELESS = 4.0
"""An algorithm that takes this many times as long as the fastest in both trials is not measured any
further."""

Seconds = Callable[[Choice, int], float]
"""Runs a collective this many times; returns the seconds of one run."""


class Tuned(NamedTuple):
    """The measured choices, and what the deadline left no time for."""

    choices: tuple[Choices, ...]
    """One for each worker count."""
    unfinished: tuple[str, ...]
    """Such as ``"broadcast with 4 workers"``."""


class OutOfTime(Exception):
    """The deadline has come."""


def tune(request: TuneRequest, *, progress: Progress | None = None) -> Tuned:
    """Measure all algorithms and choose among them; report progress before every part.

    Raises:
        UserError: the machine cannot emulate the cluster, or there was no time for anything.
        PeerError: a worker failed.
    """
    deadline_s = time.monotonic() + request.deadline_s
    parts = len(request.workers) * len(request.collectives) * len(request.sizes_bytes)
    reported = _Reported(progress, parts * (len(TRIALS) + request.rounds))
    found: list[Choices] = []
    unfinished: list[str] = []
    for workers in request.workers:
        reported.say(f"starting {workers} workers")
        with _team(request, workers) as (team, site):
            timings: list[Timing] = []
            regions: dict[Collective, tuple[Region, ...]] = {}
            for collective in request.collectives:
                reported.what = f"{collective}, {workers} workers"
                try:
                    mine = _measured(request, collective, team, site, reported, deadline_s)
                except OutOfTime:
                    unfinished.append(f"{collective} with {workers} workers")
                    continue
                timings += [timing for at_size in mine.values() for timing in at_size.values()]
                regions[collective] = _chosen(collective, site, mine)
        if regions:
            found.append(
                Choices(
                    release=release(),
                    measured=dt.datetime.now(dt.UTC).replace(microsecond=0),
                    place=name_of_place(request.place),
                    machine=machine_name(),
                    site=site,
                    regions=regions,
                    timings=tuple(timings),
                )
            )
    if not found:
        raise UserError(
            f"there was no time to measure anything within {request.deadline_s:g} s; allow more "
            "with --deadline, or measure fewer sizes or collectives"
        )
    return Tuned(tuple(found), tuple(unfinished))


class _Reported:
    """Counts the parts that are done, and reports them."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self.done = 0
        self.what = ""

    def say(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what, self.done, self._total)

    def step(self) -> None:
        self.say(self.what)
        self.done += 1


@contextmanager
def _team(request: TuneRequest, workers: int) -> Iterator[tuple[Team, Site]]:
    """Start workers; yield them with the site of their group."""
    with run_folder() as folder, hosts_of(request.place, workers) as hosts:
        setup = Setup(
            ranks=workers,
            store=str(folder / "store"),
            transport=transport_of(request.place),
            choices="built-in",  # the cache is not read: it may be damaged
            timeout_s=request.timeout_s,
        )
        with torch_team(folder, setup, hosts) as team:
            if team.ready.site is None:
                raise InternalError("the workers do not say where they are")
            yield team, team.ready.site


Measured = dict[int, dict[Choice, Timing]]
"""By size in bytes and algorithm."""


def _measured(
    request: TuneRequest,
    collective: Collective,
    team: Team,
    site: Site,
    reported: _Reported,
    deadline_s: float,
) -> Measured:
    """Measure all sizes of one collective.

    Raises:
        OutOfTime: the deadline has come.
        PeerError: a worker failed.
    """
    measured: Measured = {}
    for size_bytes in sorted(request.sizes_bytes):
        whole = whole_size(collective, site.ranks, size_bytes)
        if whole in measured:
            reported.done += len(TRIALS) + request.rounds
            continue  # small sizes are rounded up to the same

        def seconds(choice: Choice, iterations: int, size: int = whole) -> float:
            if time.monotonic() > deadline_s:
                raise OutOfTime
            return _seconds(team, collective, choice, size, iterations, request.timeout_s)

        entrants = dict.fromkeys(c.choice(whole) for c in candidates(collective, site.layout))
        rounds = race(
            list(entrants), seconds, rounds=request.rounds, lap_s=request.lap_s, step=reported.step
        )
        measured[whole] = {
            choice: Timing(
                collective=collective,
                size_bytes=whole,
                algorithm=choice.algorithm,
                blocks=choice.blocks,
                rounds_s=tuple(times),
            )
            for choice, times in rounds.items()
        }
    return measured


def race(
    entrants: list[Choice],
    seconds: Seconds,
    *,
    rounds: int,
    lap_s: float,
    step: Callable[[], None],
) -> dict[Choice, list[float]]:
    """Return the seconds of each entrant in each round, without those far too slow in the trials.

    Each round begins with another entrant.

    Args:
        entrants: the algorithms that take part.
        seconds: measures one of them.
        rounds: how often.
        lap_s: how long a turn should take.
        step: called before each round, and before each trial.
    """
    least: dict[Choice, float] = {}
    for most in TRIALS:
        step()
        for choice in entrants:
            fitting = round(lap_s / least[choice]) if choice in least else 1
            took_s = seconds(choice, min(max(fitting, 1), most))
            # The lower of the two: a trial that the machine interrupted says nothing.
            least[choice] = min(took_s, least.get(choice, took_s))
    bound_s = HOPELESS * min(least.values())
    kept = [choice for choice in entrants if least[choice] <= bound_s]
    found: dict[Choice, list[float]] = {choice: [] for choice in kept}
    for number in range(rounds):
        step()
        first = number % len(kept)
        for choice in (*kept[first:], *kept[:first]):
            fitting = round(lap_s / least[choice])
            found[choice].append(seconds(choice, min(max(fitting, 1), MOST_ITERATIONS)))
    return found


def _seconds(
    team: Team,
    collective: Collective,
    choice: Choice,
    size_bytes: int,
    iterations: int,
    timeout_s: float,
) -> float:
    """Have the workers run a collective; return the slowest rank's seconds of one run."""
    order = Order(
        contestant=OURS,
        collective=collective,
        algorithm=choice.algorithm,
        blocks=choice.blocks,
        size_bytes=size_bytes,
        iterations=iterations,
        warmup=round(iterations * WARM_SHARE) or 1,
    )
    answer = team.run(order, timeout_s)
    if isinstance(answer, Refused):
        raise PeerError(f"{collective} by {choice.algorithm}, {size_bytes} bytes: {answer.reason}")
    return max(lap.wall_s for lap in answer) / iterations


def _chosen(collective: Collective, site: Site, measured: Measured) -> tuple[Region, ...]:
    every = candidates(collective, site.layout)
    rounds = {
        size_bytes: {
            candidate: timings[choice].rounds_s
            for candidate in every
            if (choice := candidate.choice(size_bytes)) in timings
        }
        for size_bytes, timings in measured.items()
    }
    built_in = {size: built_in_candidate(collective, site.layout, size) for size in measured}
    return regions_of(rounds, built_in)
