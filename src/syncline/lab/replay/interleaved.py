"""Interleaved A/B: several ways to exchange gradients take turns on the same replayed profile.

Whatever trains a module can take part: a :class:`Contestant` says how to wrap a module and an
optimizer, and how to take a step where that is not ``zero_grad``, forward, ``backward``, ``step``.
All ranks call :func:`run_interleaved` with the same arguments.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from syncline.errors import UserError, quoted
from syncline.lab.replay.job import Lap
from syncline.lab.replay.model import Replayed, renamed_plan
from syncline.lab.replay.work import measured_timeline
from syncline.plan.plan import Plan
from syncline.plan.profile import Norm, Profile
from syncline.plan.quantities import require_count
from syncline.plan.timeline import COMMUNICATION, Span
from syncline.train.ddp import DistributedDataParallel, planned_training
from syncline.train.engine.recording import EngineTimes
from syncline.train.measure.exchange import gather_numbers
from syncline.train.measure.statistics import median

CPU = torch.device("cpu")
LONGEST_START = 100  # iterations after which a contestant must be ready for its warm-up
MAX_NORM = 1e-7  # so small that every step scales the gradients


def train_step(
    model: Any,
    optimizer: Any,
    *,
    norm: Norm | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Take one step as a training loop does: with a norm it is clipped, with a scaler scaled."""
    scaler = scaler or torch.amp.GradScaler(CPU.type, enabled=False)
    optimizer.zero_grad()
    scaler.scale(model()).backward()
    if norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, float(norm))
    scaler.step(optimizer)
    scaler.update()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One way to exchange gradients."""

    name: str
    wrap: Callable[[Replayed, Optimizer], tuple[Any, Any]]
    """Returns the model and the optimizer to train with. Parameters are equal on all ranks: they
    need no broadcast."""
    step: Callable[[Any, Any], None] | None = None
    """Takes one step with both; None for :func:`train_step`, which clips as the profile says."""
    is_ready: Callable[[Any], bool] = lambda _: True  # whether start-up is over; alike on all ranks
    synchronize: Callable[[Any], None] = lambda _: None  # finishes work left by the last step
    messages: Callable[[Any], Sequence[Span]] = lambda _: ()
    """Returns the messages of the last two iterations, where they are known, with times in ns of
    the monotonic clock."""
    close: Callable[[Any], None] = lambda _: None  # ends the model's threads and process groups


def run_interleaved(
    profile: Profile,
    contestants: Sequence[Contestant],
    *,
    rounds: int = 5,
    iterations: int = 8,
    warmup: int = 3,
    shapes: dict[str, tuple[int, ...]] | None = None,
    scaled: bool = False,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    progress: Callable[[str, int, int, int], None] | None = None,
) -> dict[str, tuple[Lap, ...]]:
    """Let every contestant train for a lap in every round, each round beginning with another one.

    Every lap has a module and a wrapper of its own, so nothing is left from one to the next.

    Args:
        profile: what to replay.
        contestants: ways to exchange gradients, with different names.
        rounds: laps of each contestant.
        iterations: measured iterations of a lap.
        warmup: iterations before those measured, once the contestant is ready.
        shapes: of parameters; see :class:`~syncline.lab.replay.model.Replayed`.
        scaled: whether every step scales the loss, as a training in float16 does.
        optimizer: makes one that updates the parameters; by default updating is emulated, too.
        progress: called after each lap, on ranks that pass it, with the contestant, the round, and
            how many of how many laps are done.

    Returns:
        The laps of each contestant, by name; the same on every rank but for :attr:`Lap.steps_s`
        and :attr:`Lap.timeline`, which are each rank's own.

    Raises:
        UserError: two contestants share a name, or there is nothing to run.
        PeerError: another rank failed.
    """
    names = [contestant.name for contestant in contestants]
    if len(set(names)) < len(names) or not names:
        raise UserError(f"interleaving needs contestants of different names, found {names}")
    for what, count in {"rounds": rounds, "iterations": iterations, "warmup": warmup}.items():
        require_count(f"interleaving: {what}", count)
    own = [c.name for c in contestants if c.step is not None]
    if (profile.norm is not None or scaled) and own:
        raise UserError(
            f"contestants that take steps of their own neither clip nor scale: {', '.join(own)}"
        )
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    for round_ in range(rounds):
        first = round_ % len(names)
        for contestant in (*contestants[first:], *contestants[:first]):
            module = Replayed(profile, rank=dist.get_rank(), shapes=shapes)
            scaler = torch.amp.GradScaler(CPU.type, enabled=scaled)
            step = functools.partial(train_step, norm=profile.norm, scaler=scaler)
            given = module.optimizer() if optimizer is None else optimizer(module.parameters())
            lap = _lap(contestant, module, given, iterations, warmup, contestant.step or step)
            laps[contestant.name].append(lap)
            del module, given
            # Wrappers refer to themselves, so only the garbage collector frees their buckets.
            gc.collect()
            if progress is not None:
                progress(contestant.name, round_, sum(map(len, laps.values())), rounds * len(names))
    return {name: tuple(of_one) for name, of_one in laps.items()}


def _lap(
    contestant: Contestant,
    module: Replayed,
    given: Optimizer,
    iterations: int,
    warmup: int,
    step: Callable[[Any, Any], None],
) -> Lap:
    clock = module.clock
    model, optimizer = contestant.wrap(module, given)
    dist.barrier()
    begun = 0
    while not contestant.is_ready(model):
        if begun == LONGEST_START:
            raise UserError(
                f"contestant {contestant.name!r} was not ready after {begun} iterations"
            )
        step(model, optimizer)
        begun += 1
    for _ in range(warmup):
        step(model, optimizer)
    idle_ns = clock.idle_ns
    ends_ns = [time.monotonic_ns()]
    for _ in range(iterations):
        step(model, optimizer)
        ends_ns.append(time.monotonic_ns())
    idle_ns = clock.idle_ns - idle_ns
    begun_ns, ended_ns, ran = module.work.begun_ns, clock.free_ns(), tuple(module.work.ran)
    contestant.synchronize(model)
    clock.wait()
    settled_ns = time.monotonic_ns()
    messages = contestant.messages(model)
    dist.barrier()
    contestant.close(model)
    own = [
        (ends_ns[-1] - ends_ns[0]) / iterations / 1e9,
        (settled_ns - ends_ns[0]) / iterations / 1e9,
        idle_ns / iterations / 1e9,
    ]
    group = dist.group.WORLD
    assert group is not None
    everyone = gather_numbers(own, group, CPU)
    return Lap(
        iteration_s=max(numbers[0] for numbers in everyone),
        settled_s=max(numbers[1] for numbers in everyone),
        steps_s=tuple((b - a) / 1e9 for a, b in itertools.pairwise(ends_ns)),
        idle_s=median([numbers[2] for numbers in everyone]),
        timeline=measured_timeline(contestant.name, begun_ns, ended_ns, (*ran, *messages)),
    )


def ddp_baseline(name: str = "ddp", **arguments: Any) -> Contestant:
    """Return torch's own DistributedDataParallel, with arguments such as ``bucket_cap_mb=5``."""

    def wrap(module: Replayed, optimizer: Optimizer) -> tuple[Any, Any]:
        # Parameters are equal; broadcasting them would cost seconds each time.
        model = nn.parallel.DistributedDataParallel(module, init_sync=False, **arguments)
        return model, optimizer

    return Contestant(name=name, wrap=wrap)


def planned(plan: Plan, name: str | None = None) -> Contestant:
    """Return Syncline's DistributedDataParallel under a plan, by default named after its planner.

    The plan's tensors have the names of the profile.
    """

    def wrap(module: Replayed, optimizer: Optimizer) -> tuple[Any, Any]:
        fitting = renamed_plan(plan, module.gradient_names)
        model = DistributedDataParallel(
            module, plan=fitting, check=False, compression=plan.wire, init_sync=False
        )
        if plan.wait != "need":
            return model, optimizer
        return model, model.overlap(optimizer, shard=plan.sharded)

    def messages(model: DistributedDataParallel) -> list[Span]:
        if model.plan is None:
            raise UserError(
                f"the plan of {quoted(plan.planner)} did not run: {model.run_record().reason}; "
                "replay a profile whose gradients can be planned"
            )
        recorded = planned_training(model).reducer.executor.recorded()
        if not isinstance(recorded, EngineTimes):
            return []  # the reducer's times are not known
        labels = [plan.label(tensors) for tensors in plan.message_tensors()]
        sizes = plan.message_bytes()
        return [
            Span(
                lane=COMMUNICATION,
                start_ns=m.issued_ns,
                stop_ns=m.finished_ns,
                label=labels[m.message],
                kind="message",
                size_bytes=sizes[m.message],
                ready_ns=m.ready_ns,
            )
            for m in recorded.messages
        ]

    return Contestant(
        name=name or plan.planner,
        wrap=wrap,
        is_ready=lambda model: not model.measuring,
        synchronize=lambda model: model.synchronize(),
        messages=messages,
        close=lambda model: planned_training(model).reducer.close(),
    )
