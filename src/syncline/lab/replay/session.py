"""Runs a replay: emulates a cluster, makes plans for it, and has workers measure them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from syncline.errors import MismatchError, UserError, quoted
from syncline.files.report.units import size
from syncline.lab.processes import run_folder
from syncline.lab.replay.job import InterleavedJob, Job, Laps, ProbeJob
from syncline.lab.replay.result import PlanTimes, Replay
from syncline.lab.testbed import Cluster, Testbed
from syncline.lab.testbed.job import worker_environment
from syncline.lab.workers import START_S, Progress, WorkerGroup, module_command
from syncline.plan.document import Value, described
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planned, planner_named
from syncline.plan.planners.ddp import Ddp
from syncline.plan.profile import Profile
from syncline.plan.quantities import require_count, require_finite
from syncline.plan.simulator.predict import Forecast, predict
from syncline.plan.simulator.transformations import with_sharding
from syncline.plan.timeline import Timeline
from syncline.train.measure.machine import machine_name

PATIENCE = 3.0  # without ``timeout_s`` a replay may take START_S and this times its prediction
PROBE_S = 600.0  # without ``timeout_s`` the probe may take this long
LEAST_PROBED_BYTES, MOST_PROBED_BYTES = 1 << 20, 1 << 26
"""Bounds of the largest message that is probed; between them it has the size of all gradients."""
COPIES = 3.5
"""Copies of all gradients that a worker holds at most: the gradients, their buckets, those that are
being rebuilt, and what a backend needs for itself. Parameters are zeros that take no memory."""
WORKER_BYTES = 300e6  # memory that Python and torch take in each worker


class ReplayRequest(Value, frozen=True, kw_only=True):
    """What to replay."""

    profile: Profile
    cluster: Cluster
    planners: tuple[str, ...]  # names of planners; ``ddp`` is torch's own DistributedDataParallel
    plans: tuple[Plan, ...] = ()  # ready plans to run as well, each under its planner's name
    network: Network | None = None  # to plan and predict with; None: the cluster is probed
    shard: bool = False  # each worker updates its share of the parameters, under plans that overlap
    rounds: Annotated[int, described("Turns of every planner.")] = 5
    iterations: Annotated[int, described("Measured iterations of a turn.")] = 8
    warmup: Annotated[int, described("Iterations before them.")] = 3
    timeout_s: Annotated[
        float | None,
        described(
            "Give up after this many seconds.  [default: 3 times what is predicted, and 2 minutes]"
        ),
    ] = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [*self.planners, *(plan.planner for plan in self.plans)]
        if not names:
            raise UserError("nothing to replay: name at least one planner, or give a plan")
        for index, name in enumerate(names):
            if name in names[:index]:
                raise UserError(f"{quoted(name)} would run twice; name each planner once")
        for name in self.planners:
            planner_named(name)
        for field in ("rounds", "iterations", "warmup"):
            require_count(field, getattr(self, field))
        if self.cluster.workers < 2:
            raise UserError("a replay needs at least 2 workers; emulate more hosts or workers")
        if self.network is not None and self.network.workers != self.cluster.workers:
            raise MismatchError(
                f"network {quoted(self.network.name)} is of {self.network.workers} workers, the "
                f"emulated cluster has {self.cluster.workers}; leave the network out to probe the "
                "cluster"
            )
        if self.timeout_s is not None:
            require_finite("the timeout", self.timeout_s, above_0=True)


class ReplayOutcome(NamedTuple):
    """What a replay found; plans, forecasts and timelines are in the order of its entries."""

    replay: Replay
    profile: Profile
    network: Network  # the network that plans and predictions are for
    plans: tuple[Plan, ...]
    forecasts: tuple[Forecast, ...]
    timelines: tuple[Timeline, ...]  # the last iteration of rank 0 in the last round


def replay(request: ReplayRequest, *, progress: Progress | None = None) -> ReplayOutcome:
    """Measure plans on an emulated cluster, where workers wait instead of computing.

    ``progress`` is called before every part.

    Raises:
        UserError: a planner cannot plan the profile, a plan cannot be run, the machine cannot
            emulate the cluster or has too little memory.
        PeerError: a worker failed, or it took too long.
    """
    require_memory(request.profile, request.cluster.workers)
    tell = progress or (lambda *_: None)
    with _workers(request, tell) as ask:
        network = request.network
        if network is None:
            tell("probing the network", 0, 1)
            gradient_bytes = request.profile.gradient_bytes
            largest_bytes = min(max(gradient_bytes, LEAST_PROBED_BYTES), MOST_PROBED_BYTES)
            network = ask(ProbeJob(largest_bytes=largest_bytes), Network, PROBE_S)
        # Emulated computing takes no core from the exchange, so neither slows the other.
        network = msgspec.structs.replace(network, contention=Contention(), contention_by_need=None)
        tell("planning", 0, 1)
        whole = with_sharding(request.profile, None)
        sharded = with_sharding(request.profile, network.workers)
        known = sharded if request.shard or request.profile.sharded else whole
        plans = (*(planned(name, known, network) for name in request.planners), *request.plans)
        forecasts = tuple(predict(sharded if p.sharded else whole, network, p) for p in plans)
        names = (*request.planners, *(plan.planner for plan in request.plans))
        iterations = request.rounds * (request.warmup + request.iterations)
        predicted_s = iterations * math.fsum(f.prediction.iteration_s for f in forecasts)
        usual_s = START_S + PATIENCE * predicted_s
        contestants: dict[str, Plan | None] = dict(zip(names, plans, strict=True))
        if Ddp.NAME in request.planners:
            contestants[Ddp.NAME] = None  # torch's own class, not its buckets as a plan
        job = InterleavedJob(
            profile=whole,
            contestants=contestants,
            rounds=request.rounds,
            iterations=request.iterations,
            warmup=request.warmup,
        )
        laps: Laps = ask(job, Laps, usual_s)
    entries = tuple(
        PlanTimes(
            planner=name,
            messages=len(plan.messages),
            in_flight=plan.in_flight,
            wait=plan.wait,
            predicted_s=forecast.prediction.iteration_s,
            lower_bound_s=forecast.prediction.lower_bound_s,
            rounds_s=tuple(lap.iteration_s for lap in laps[name]),
            settled_s=tuple(lap.settled_s for lap in laps[name]),
            idle_s=tuple(lap.idle_s for lap in laps[name]),
            iterations_s=tuple(lap.steps_s for lap in laps[name]),
        )
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
    return ReplayOutcome(
        replay=found,
        profile=request.profile,
        network=network,
        plans=plans,
        forecasts=forecasts,
        timelines=tuple(laps[name][-1].timeline for name in names),
    )


def require_memory(profile: Profile, workers: int) -> None:
    """Raise a UserError if all workers' gradients do not fit into memory."""
    needed = workers * (COPIES * profile.gradient_bytes + WORKER_BYTES)
    available = _available_bytes()
    if needed > available:
        raise UserError(
            f"{workers} workers with {size(profile.gradient_bytes)} of gradients each need about "
            f"{size(needed)} of memory, and {size(available)} are free; emulate fewer hosts"
        )


def _available_bytes() -> int:
    """Return how much memory this machine has left."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def _workers(
    request: ReplayRequest, progress: Progress
) -> Iterator[Callable[[Job, Any, float], Any]]:
    """Start the workers on the hosts of a testbed; yield a function that has them do a job.

    The function takes a job, the type of rank 0's answer, and how many seconds the job may take if
    the request has no ``timeout_s``. It returns that answer.
    """
    progress("starting the workers", 0, 1)
    cluster, timeout_s = request.cluster, request.timeout_s
    with run_folder() as folder, Testbed(cluster) as bed, WorkerGroup(folder) as workers:
        command = module_command(
            "syncline.lab.replay.worker", workers.path, str(timeout_s or PROBE_S)
        )
        for rank in range(cluster.workers):
            environment = {
                **worker_environment(cluster, rank, os.environ),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(folder),
            }
            host = bed.hosts[rank // cluster.workers_per_host]
            workers.start(host, command, environment, rank=rank)
        start_s = timeout_s or START_S
        workers.gather(cluster.workers, timeout_s=start_s, overdue=_overdue(start_s))

        def ask(job: Job, kind: Any, usual_s: float) -> Any:
            limit_s = timeout_s or usual_s
            answers = workers.ask(
                job, kind | None, timeout_s=limit_s, overdue=_overdue(limit_s), progress=progress
            )
            return answers[0]

        yield ask


def _overdue(timeout_s: float) -> str:
    return (
        f"the replay was stopped after {timeout_s:.0f} s; take fewer rounds or iterations, or "
        "allow more time with --timeout"
    )
