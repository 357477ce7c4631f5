"""A replay from the outside: an emulated cluster, the plans for it, and what they measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from syncline.errors import PeerError, SynclineError, UserError
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.model.timeline import Timeline
from syncline.planners import planner_named
from syncline.processes import end_of, machine_name, run_folder
from syncline.replay.job import (
    Contender,
    ContestJob,
    Job,
    Lap,
    LapDone,
    ProbeJob,
    load_laps,
    save_job,
)
from syncline.replay.request import Request
from syncline.replay.result import Entry, Replay
from syncline.report.units import size
from syncline.simulator.predict import Forecast, predict
from syncline.testbed import JobResult, Testbed

__all__ = ["Outcome", "replay", "require_memory"]

PATIENCE = 3.0
"""Without a deadline of the user's, a replay may take this many times as long as is predicted."""
START_S = 120.0
"""And so much longer: workers import torch and connect."""
PROBE_S = 600.0
"""Likewise, the probe may take so long: what it takes is not known before."""
LEAST_PROBED_BYTES, MOST_PROBED_BYTES = 1 << 20, 1 << 26
"""Size of the largest message that is probed; no larger than all gradients, if in between."""
LAST_LINES = 20
"""Lines of a failed worker's standard error that are passed on where it gave no reason."""
COPIES = 3.5
"""Copies of all gradients that a worker holds at most: the gradients, their buckets, those that are
being rebuilt, and what a backend needs for itself. Parameters are zeros that take no memory."""
WORKER_BYTES = 300e6
"""What Python and torch take in each worker."""

Progress = Callable[[str, int, int], None]
"""Takes what is being done, and how many of how many parts of it are done."""


class Outcome(NamedTuple):
    """What a replay found."""

    replay: Replay
    profile: Profile
    network: Network
    """What was planned and predicted with."""
    plans: tuple[Plan, ...]
    """Of each entry."""
    forecasts: tuple[Forecast, ...]
    """Of each entry."""
    timelines: tuple[Timeline, ...]
    """Of each entry: the last iteration of rank 0 in the last round."""


def replay(
    request: Request,
    *,
    progress: Progress | None = None,
) -> Outcome:
    """Measure plans on an emulated cluster, with computation that is waited for.

    Args:
        request: what is to be replayed.
        progress: is told how far it is.

    Raises:
        UserError: a planner cannot plan the profile, a plan cannot be run, the machine cannot
            emulate the cluster or has too little memory.
        PeerError: a worker failed, or it took too long.
    """
    require_memory(request.profile, request.cluster.workers)
    tell = progress or _silence
    with run_folder() as folder, Testbed(request.cluster) as bed:
        workers = _Workers(bed, folder, tell)
        network = request.network
        if network is None:
            tell("probing the network", 0, 1)
            network = workers.probe(request)
        # What waits takes no core from the exchange, so nothing slows down beside it.
        network = msgspec.structs.replace(network, contention=1.0)
        tell("planning", 0, 1)
        plans = (
            *(planner_named(name).plan(request.profile, network) for name in request.planners),
            *request.plans,
        )
        forecasts = tuple(predict(request.profile, network, plan) for plan in plans)
        names = (*request.planners, *(plan.planner for plan in request.plans))
        laps = workers.contest(request, names, plans, _deadline_s(request, forecasts))
    entries = tuple(
        _entry(name, plan, forecast, laps[name])
        for name, plan, forecast in zip(names, plans, forecasts, strict=True)
    )
    found = Replay(
        model=request.profile.model,
        cluster=str(request.cluster),
        network=network.name,
        workers=request.cluster.workers,
        machine=machine_name(),
        warmup=request.warmup,
        iterations=request.iterations,
        computation_s=forecasts[0].prediction.computation_s,
        gradient_bytes=request.profile.gradient_bytes,
        entries=entries,
        notes=request.notes,
    )
    return Outcome(
        replay=found,
        profile=request.profile,
        network=network,
        plans=plans,
        forecasts=forecasts,
        timelines=tuple(laps[name][-1].timeline for name in names),
    )


def require_memory(profile: Profile, workers: int) -> None:
    """Check that all workers' gradients fit into memory.

    Raises:
        UserError: they do not.
    """
    needed = workers * (COPIES * profile.gradient_bytes + WORKER_BYTES)
    free = Path("/proc/meminfo")
    if not free.exists():
        return  # not Linux: the testbed refuses it
    for line in free.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if needed > available:
                raise UserError(
                    f"{workers} workers with {size(profile.gradient_bytes)} of gradients each need "
                    f"about {size(needed)} of memory, and {size(available)} are free; emulate "
                    "fewer hosts"
                )


def _silence(stage: str, done: int, total: int) -> None:
    pass


def _deadline_s(request: Request, forecasts: Sequence[Forecast]) -> float:
    if request.timeout_s is not None:
        return request.timeout_s
    iterations = request.rounds * (request.warmup + request.iterations)
    predicted_s = iterations * math.fsum(f.prediction.iteration_s for f in forecasts)
    return START_S + PATIENCE * predicted_s


class _Workers:
    """Runs jobs on the hosts of a testbed."""

    def __init__(self, bed: Testbed, folder: Path, progress: Progress) -> None:
        self._bed = bed
        self._folder = folder
        self._progress = progress

    def probe(self, request: Request) -> Network:
        result = self._folder / "network.json"
        gradient_bytes = request.profile.gradient_bytes
        self._run(
            ProbeJob(
                result=str(result),
                timeout_s=request.timeout_s or PROBE_S,
                largest_bytes=min(max(gradient_bytes, LEAST_PROBED_BYTES), MOST_PROBED_BYTES),
            )
        )
        return Network.load(result)

    def contest(
        self, request: Request, names: Sequence[str], plans: Sequence[Plan], timeout_s: float
    ) -> dict[str, tuple[Lap, ...]]:
        result = self._folder / "laps.json"
        self._progress("starting the workers", 0, 1)
        self._run(
            ContestJob(
                result=str(result),
                timeout_s=timeout_s,
                profile=request.profile,
                contenders=tuple(
                    # Asked for by that name, DDP is torch's own class, not its buckets as a plan.
                    Contender(name=name, plan=None if name in request.stock else plan)
                    for name, plan in zip(names, plans, strict=True)
                ),
                rounds=request.rounds,
                iterations=request.iterations,
                warmup=request.warmup,
            )
        )
        return load_laps(result)

    def _run(self, job: Job) -> None:
        path = self._folder / "job.json"
        save_job(path, job)
        said: dict[int, list[str]] = {}

        def take(rank: int, is_error: bool, line: bytes) -> None:
            if is_error:
                said.setdefault(rank, []).append(line.decode(errors="replace"))
            else:
                self._read(line)

        # -P: a module in the working folder must not take the place of one of Python's.
        command = [sys.executable, "-P", "-m", "syncline.replay.worker", str(path)]
        result = self._bed.run(
            command,
            environment={"OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder)},
            timeout_s=job.timeout_s,
            output=take,
        )
        _require_success(result, said, job.timeout_s)

    def _read(self, line: bytes) -> None:
        try:
            lap = msgspec.json.decode(line, type=LapDone)
        except msgspec.DecodeError:  # something that a library says
            return
        self._progress(f"replaying {lap.name}", lap.done, lap.total)


def _require_success(result: JobResult, said: dict[int, list[str]], timeout_s: float) -> None:
    """Raise what ended a job, in the class of the worker's own error where it gave one."""
    if result.timed_out:
        raise PeerError(
            f"the replay was stopped after {timeout_s:.0f} s; take fewer rounds or iterations, or "
            "give it more with --timeout"
        )
    cause = result.cause
    if cause is None:
        return
    lines = said.get(cause.rank, [])
    reason = next((line for line in reversed(lines) if line.startswith("error: ")), None)
    if reason is None:
        last = "\n".join([", and said:", *lines[-LAST_LINES:]]) if lines else ""
        raise SynclineError(f"worker {cause.rank} {end_of(cause.code)}{last}")
    kind = UserError if cause.code == UserError.exit_code else PeerError
    raise kind(f"worker {cause.rank}: {reason.removeprefix('error: ')}")


def _entry(name: str, plan: Plan, forecast: Forecast, laps: Sequence[Lap]) -> Entry:
    return Entry(
        planner=name,
        messages=len(plan.messages),
        in_flight=plan.in_flight,
        wait=plan.wait,
        predicted_s=forecast.prediction.iteration_s,
        lower_bound_s=forecast.prediction.lower_bound_s,
        rounds_s=tuple(lap.iteration_s for lap in laps),
        settled_s=tuple(lap.settled_s for lap in laps),
        idle_s=tuple(lap.idle_s for lap in laps),
        iterations_s=tuple(lap.steps_s for lap in laps),
    )
