"""The benchmark of collectives: contestants run interleaved, and their times are collected."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from syncline.comm.collectives import PROGRAMS, Pipelined, best_blocks
from syncline.comm.groups import Choice
from syncline.errors import SynclineError, UserError
from syncline.lab.bench.launch import Team, meeting, mpi_team, torch_team
from syncline.lab.bench.messages import LapTimes, Order, Refused
from syncline.lab.bench.request import BenchmarkRequest, name_of_place
from syncline.lab.bench.result import (
    MPIS,
    OURS,
    PREFIX,
    Absent,
    Benchmark,
    CollectiveTimes,
    whole_size,
)
from syncline.lab.workers import Progress
from syncline.train.measure.machine import machine_name

TRIALS = (1, 10)  # most iterations of a lap in each trial; they precede the first round
MOST_ITERATIONS = 5000  # of a lap in a round
# To choose the number of blocks: inside a host about a wake-up and 5 GB/s; latency between hosts.
HOST_ALPHA_S, HOST_BETA_S_PER_BYTE = 5e-6, 2e-10
NETWORK_ALPHA_S = 50e-6
Candidate = TypeVar("Candidate")


def race(
    candidates: Sequence[Candidate],
    lap: Callable[[Candidate, int], LapTimes | None],
    *,
    rounds: int,
    lap_s: float,
    step: Callable[[], None],
    hopeless: float = math.inf,
) -> dict[Candidate, tuple[int, list[LapTimes]]]:
    """Interleave candidates; return the iterations a lap and the laps of each.

    Every round has one lap of each candidate, and starts with another one. ``lap`` measures a
    candidate over a number of iterations, which the trials choose so that it takes ``lap_s``. If it
    returns None, the candidate cannot take part and is dropped. ``step`` is called before each
    trial and round. A candidate whose best trial takes more than ``hopeless`` times as long as the
    best of all is not measured any further.
    """
    least_s: dict[Candidate, float] = {}

    def fitting(candidate: Candidate, most: int) -> int:
        wanted = round(lap_s / least_s[candidate]) if candidate in least_s else 1
        return min(max(wanted, 1), most)

    left = list(candidates)
    for most in TRIALS:
        step()
        for candidate in tuple(left):
            if took := lap(candidate, fitting(candidate, most)):
                # The lower of the two: the machine may have interrupted one trial.
                least_s[candidate] = min(took.wall_s, least_s.get(candidate, took.wall_s))
            else:
                left.remove(candidate)
    bound_s = hopeless * min((least_s[candidate] for candidate in left), default=0.0)
    kept = [candidate for candidate in left if least_s[candidate] <= bound_s]
    found = {e: (fitting(e, MOST_ITERATIONS), list[LapTimes]()) for e in kept}
    for number in range(rounds):
        step()
        first = number % len(kept) if kept else 0
        for candidate in (*kept[first:], *kept[:first]):
            if candidate in found:
                iterations, laps = found[candidate]
                if took := lap(candidate, iterations):
                    laps.append(took)
                else:
                    del found[candidate]
    return found


class Reported:
    """Counts the parts of a measurement, and reports them as progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self.done = 0
        self.what = ""

    def say(self, what: str) -> None:
        """Report the part that begins."""
        self._progress(what, self.done, self._total)

    def step(self) -> None:
        """Report the next part, and count it."""
        self.say(self.what)
        self.done += 1


def measure_collectives(
    request: BenchmarkRequest, *, progress: Progress = lambda _what, _done, _total: None
) -> Benchmark:
    """Measure contestants, interleaved.

    Every size is a :func:`race` of its own. Progress is reported before every part.

    Raises:
        UserError: the machine cannot emulate the cluster, or no contestant could take part.
        PeerError: Syncline's or torch's workers failed. An MPI that fails is absent.
    """
    parts = len(request.workers) * len(request.sizes_bytes)
    reported = Reported(progress, parts * (len(TRIALS) + request.rounds))
    entries: list[CollectiveTimes] = []
    absent: list[Absent] = []
    versions: dict[str, str] = {}
    for workers in request.workers:
        reported.say(f"starting {workers} workers")
        with _teams(request, workers) as teams:
            for name, team in teams.present.items():
                versions[name] = team.ready.version
                if team.ready.choices:
                    versions[f"choices, {workers} workers"] = team.ready.choices
            for size_bytes in request.sizes_bytes:
                whole = whole_size(request.collective, workers, size_bytes)
                reported.what = f"{workers} workers, {whole:,} B"
                entries += _measured(request, workers, whole, teams, reported)
            absent += teams.absent
    if not entries:
        reasons = "; ".join(dict.fromkeys(f"{a.contestant}: {a.reason}" for a in absent))
        raise UserError(f"no library could be measured: {reasons}")
    return Benchmark(
        collective=request.collective,
        place=name_of_place(request.place),
        rate_bytes_per_s=request.rate_bytes_per_s,
        machine=machine_name(),
        versions=versions,
        entries=tuple(entries),
        absent=tuple(absent),
    )


@dataclass
class _Teams:
    """The teams of one worker count, by name, and who does not take part."""

    workers: int
    present: dict[str, Team] = field(default_factory=dict)
    absent: list[Absent] = field(default_factory=list)

    def leave_out(self, contestant: str, reason: str) -> None:
        self.absent.append(Absent(contestant=contestant, workers=self.workers, reason=reason))


@contextlib.contextmanager
def _teams(request: BenchmarkRequest, workers: int) -> Iterator[_Teams]:
    teams = _Teams(workers)
    with (
        meeting(request.place, workers, choices="measured", timeout_s=request.timeout_s) as at,
        contextlib.ExitStack() as stack,
    ):
        if any(contestant not in MPIS for contestant in request.contestants):
            teams.present["torch"] = stack.enter_context(torch_team(at))
        for mpi in (name for name in request.contestants if name in MPIS):
            python = request.pythons.get(mpi, Path("build", f"bench-{mpi}", "bin", "python"))
            try:
                team = mpi_team(mpi, python, at, tcp=request.place != "shared")
                teams.present[mpi] = stack.enter_context(team)
            except SynclineError as error:
                teams.leave_out(mpi, str(error))
        yield teams


def _measured(
    request: BenchmarkRequest, workers: int, size_bytes: int, teams: _Teams, reported: Reported
) -> list[CollectiveTimes]:
    """Measure all contestants with one worker count and one size."""

    def lap(contestant: str, iterations: int) -> LapTimes | None:
        if any(absent.contestant == contestant for absent in teams.absent):
            return None
        team = teams.present[contestant if contestant in MPIS else "torch"]
        choice = None
        if contestant.startswith(PREFIX):
            algorithm = contestant.removeprefix(PREFIX)
            choice = Choice(algorithm, _blocks(request, algorithm, workers, size_bytes))
        order = Order(
            contestant=contestant if choice is None else OURS,
            collective=request.collective,
            choice=choice,
            size_bytes=size_bytes,
            iterations=iterations,
        )
        try:
            answer = team.run(order)
        except SynclineError as error:
            if contestant not in MPIS:
                raise
            answer = Refused(reason=str(error))
        if isinstance(answer, LapTimes):
            return answer
        teams.leave_out(contestant, answer.reason)
        return None

    found = race(
        request.contestants, lap, rounds=request.rounds, lap_s=request.lap_s, step=reported.step
    )
    return [
        CollectiveTimes(
            contestant=contestant,
            workers=workers,
            size_bytes=size_bytes,
            iterations=iterations,
            rounds_s=tuple(lap.wall_s for lap in laps),
            cpu_s=tuple(lap.cpu_s for lap in laps),
        )
        for contestant, (iterations, laps) in found.items()
    ]


def _blocks(request: BenchmarkRequest, algorithm: str, workers: int, size_bytes: int) -> int | None:
    """Return the number of blocks for an algorithm that pipelines them; None for others."""
    if not isinstance(PROGRAMS[request.collective][algorithm], Pipelined):
        return None
    rate = request.rate_bytes_per_s
    return best_blocks(
        request.collective,
        algorithm,
        workers,
        size_bytes=size_bytes,
        alpha_s=HOST_ALPHA_S if rate is None else NETWORK_ALPHA_S,
        beta_s_per_byte=HOST_BETA_S_PER_BYTE if rate is None else 1 / rate,
    )
