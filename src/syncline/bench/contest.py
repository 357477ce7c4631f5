"""The benchmark of collectives: contestants take turns, and what they measure is collected."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from syncline.bench.launch import Team, hosts_of, mpi_team, torch_team
from syncline.bench.messages import LapTimes, Order, Refused, Setup
from syncline.bench.names import MPIS, OURS, ZERO_COPY, algorithm_of
from syncline.bench.request import BenchmarkRequest, name_of_place, transport_of
from syncline.bench.result import Absent, Benchmark, CollectiveTimes, whole_size
from syncline.collectives import PROGRAMS, Pipelined, best_blocks
from syncline.errors import SynclineError, UserError
from syncline.processes import machine_name, run_folder
from syncline.testbed import Cluster
from syncline.workers import Progress

__all__ = ["measure_collectives"]

MOST_ITERATIONS = 5000
TRIALS = (1, 30)
"""Iterations of the laps before the first round, from which the number for the others is taken."""
WARM_SHARE = 0.1
"""Iterations before those measured, as a share of them."""
HOST_ALPHA_S, HOST_BETA_S_PER_BYTE = 5e-6, 2e-10
"""Startup and time per byte inside a host, for the number of blocks: roughly a wake-up, and
5 GB/s."""
NETWORK_ALPHA_S = 50e-6
"""Startup of a message between hosts, for the number of blocks."""


def measure_collectives(
    request: BenchmarkRequest, *, progress: Progress | None = None
) -> Benchmark:
    """Measure contestants in turns.

    For every size, each contestant first does one lap, which gives the number of iterations that
    fill a turn. Then it has a turn in every round. Each round begins with another contestant.
    Progress is reported before every part.

    Raises:
        UserError: the machine cannot emulate the cluster, or no contestant could take part.
        PeerError: Syncline's or torch's workers failed. An MPI that fails is absent.
    """
    tell = progress or (lambda _what, _done, _total: None)
    entries: list[CollectiveTimes] = []
    absent: list[Absent] = []
    versions: dict[str, str] = {}
    total = len(request.workers) * len(request.sizes_bytes) * (request.rounds + 1)
    done = 0
    for workers in request.workers:
        tell(f"starting {workers} workers", done, total)
        with _teams(request, workers) as teams:
            for name, team in teams.present.items():
                versions[name] = team.ready.version
                if team.ready.choices:
                    versions[f"choices, {workers} workers"] = team.ready.choices
            for size_bytes in request.sizes_bytes:
                whole = whole_size(request.collective, workers, size_bytes)
                race = _Race(request, workers, whole, teams)
                for number in range(request.rounds + 1):
                    tell(f"{workers} workers, {whole:,} B", done, total)
                    race.round(number)
                    done += 1
                entries += race.entries()
            absent += teams.absent
    if not entries:
        reasons = "; ".join(dict.fromkeys(f"{a.contestant}: {a.reason}" for a in absent))
        raise UserError(f"nobody could be measured: {reasons}")
    return Benchmark(
        collective=request.collective,
        place=name_of_place(request.place),
        rate_bytes_per_s=request.rate_bytes_per_s,
        machine=machine_name(),
        versions=versions,
        entries=tuple(entries),
        absent=tuple(absent),
    )


class _Teams:
    """The teams of one worker count, by name, and who does not take part."""

    def __init__(self, workers: int) -> None:
        self.present: dict[str, Team] = {}
        self.absent: list[Absent] = []
        self._workers = workers

    def of(self, contestant: str) -> Team | None:
        """Return the team that a contestant belongs to, unless it is absent."""
        if any(a.contestant == contestant for a in self.absent):
            return None
        return self.present.get(contestant if contestant in MPIS else "torch")

    def leave_out(self, contestant: str, reason: str) -> None:
        self.absent.append(Absent(contestant=contestant, workers=self._workers, reason=reason))


@contextlib.contextmanager
def _teams(request: BenchmarkRequest, workers: int) -> Iterator[_Teams]:
    cluster = request.place if isinstance(request.place, Cluster) else None
    teams = _Teams(workers)
    if request.place == "tcp" and ZERO_COPY in request.contestants:
        teams.leave_out(ZERO_COPY, "takes shared memory inside a host")
    elif cluster is not None and cluster.workers_per_host < 2 and ZERO_COPY in request.contestants:
        teams.leave_out(ZERO_COPY, "hosts share no memory")
    with run_folder() as folder, contextlib.ExitStack() as stack:
        hosts = stack.enter_context(hosts_of(request.place, workers))
        setup = Setup(
            ranks=workers,
            store=str(folder / "store"),
            transport=transport_of(request.place),
            choices="measured",
            timeout_s=request.timeout_s,
        )
        if any(contestant not in MPIS for contestant in request.contestants):
            teams.present["torch"] = stack.enter_context(torch_team(folder, setup, hosts))
        for mpi in (name for name in request.contestants if name in MPIS):
            python = request.pythons.get(mpi, Path("build", f"bench-{mpi}", "bin", "python"))
            tcp = request.place != "shared"
            try:
                team = mpi_team(mpi, python, folder, setup, hosts, tcp=tcp)
                teams.present[mpi] = stack.enter_context(team)
            except SynclineError as error:
                teams.leave_out(mpi, str(error))
        yield teams


def _slowest_s(laps: list[LapTimes]) -> float:
    return max(lap.wall_s for lap in laps)


class _Race:
    """The turns of all contestants for one worker count and size."""

    def __init__(
        self, request: BenchmarkRequest, workers: int, size_bytes: int, teams: _Teams
    ) -> None:
        self._request = request
        self._workers = workers
        self._size_bytes = size_bytes
        self._teams = teams
        self._iterations: dict[str, int] = {}
        self._laps: dict[str, list[tuple[float, float]]] = {}

    def round(self, number: int) -> None:
        """Let every contestant do a lap; round 0 finds out how many iterations fill a turn."""
        names = self._request.contestants
        first = number % len(names)
        for contestant in (*names[first:], *names[:first]):
            team = self._teams.of(contestant)
            if team is None or (number and contestant not in self._iterations):
                continue
            if number == 0:
                self._try_out(team, contestant)
            elif laps := self._lap(team, contestant, self._iterations[contestant]):
                cpu_s = math.fsum(lap.cpu_s for lap in laps)
                iterations = self._iterations[contestant]
                times = _slowest_s(laps) / iterations, cpu_s / iterations
                self._laps.setdefault(contestant, []).append(times)

    def _try_out(self, team: Team, contestant: str) -> None:
        """Find out how many iterations fill a lap: try one, and more if that was quick."""
        for trial in TRIALS:
            laps = self._lap(team, contestant, trial)
            if laps is None:
                return
            fitting = self._request.lap_s * trial / _slowest_s(laps)
            self._iterations[contestant] = min(max(round(fitting), 1), MOST_ITERATIONS)
            if fitting < TRIALS[-1]:
                return

    def _lap(self, team: Team, contestant: str, iterations: int) -> list[LapTimes] | None:
        """Return what the ranks measured, or None if the contestant is left out from now on."""
        try:
            answer = team.run(self._order(contestant, iterations), self._request.timeout_s)
        except SynclineError as error:
            if contestant not in MPIS:
                raise
            self._teams.leave_out(contestant, str(error))
            return None
        if isinstance(answer, Refused):
            self._teams.leave_out(contestant, answer.reason)
            return None
        return answer

    def _order(self, contestant: str, iterations: int) -> Order:
        algorithm = algorithm_of(contestant)
        return Order(
            contestant=contestant if algorithm is None else OURS,
            collective=self._request.collective,
            algorithm=algorithm,
            blocks=None if algorithm is None else self._blocks(algorithm),
            size_bytes=self._size_bytes,
            iterations=iterations,
            warmup=math.ceil(iterations * WARM_SHARE),
        )

    def _blocks(self, algorithm: str) -> int | None:
        """Return the number of blocks for an algorithm that pipelines them; None for others."""
        if not isinstance(PROGRAMS[self._request.collective][algorithm], Pipelined):
            return None
        rate = self._request.rate_bytes_per_s
        return best_blocks(
            self._request.collective,
            algorithm,
            self._workers,
            size_bytes=self._size_bytes,
            alpha_s=HOST_ALPHA_S if rate is None else NETWORK_ALPHA_S,
            beta_s_per_byte=HOST_BETA_S_PER_BYTE if rate is None else 1 / rate,
        )

    def entries(self) -> list[CollectiveTimes]:
        """Return what was measured in all rounds."""
        return [
            CollectiveTimes(
                contestant=contestant,
                workers=self._workers,
                size_bytes=self._size_bytes,
                iterations=self._iterations[contestant],
                rounds_s=tuple(wall_s for wall_s, _ in laps),
                cpu_s=tuple(cpu_s for _, cpu_s in laps),
            )
            for contestant in self._request.contestants
            if len(laps := self._laps.get(contestant, [])) == self._request.rounds
        ]
