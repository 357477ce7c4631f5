"""What the workers of the tests in this folder run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncline.errors import UserError
from syncline.lab.replay.interleaved import (
    Contestant,
    planned,
    run_interleaved,
    stock_ddp,
    train_step,
)
from syncline.lab.replay.model import Replayed, ReplayedOptimizer, gradient_value
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planner_named
from syncline.plan.profile import Profile
from syncline.plan.simulator.transformations import with_compute_scale
from tests.lab.replay.examples import layers

WARMUP, ITERATIONS = 3, 2


def plan_of(planner: str, profile: Profile) -> Plan:
    """Return a plan for the workers of this job."""
    network = Network.line(workers=dist.get_world_size(), a_s=1e-4, b_s_per_byte=1e-7)
    return planner_named(planner).plan(profile, network)


def profile(scale: float = 0.05, **changes: Any) -> Profile:
    """Return the profile of three layers, which takes 5 ms an iteration."""
    return with_compute_scale(layers(**changes), scale)


def averaged(tensor: int, iteration: int) -> float:
    ranks = range(dist.get_world_size())
    return sum(gradient_value(rank, iteration, tensor) for rank in ranks) / len(ranks)


def _watched(contestant: Contestant, seen: dict[str, list[float]]) -> Contestant:
    """Return a contestant whose gradients are noted when all is settled."""

    def step(model: Any, optimizer: Any) -> None:
        train_step(model, optimizer)
        module: Replayed = model.module
        contestant.synchronize(model)
        named = dict(module.named_parameters())
        gradients = [named[g.name].grad for g in module.profile.gradients]
        seen.setdefault(contestant.name, []).extend(float(g.flatten()[0]) for g in gradients)
        # Thirds are rounded in another order in each part of a message.
        assert all(torch.allclose(g, g.flatten()[0]) for g in gradients)

    return Contestant(
        name=contestant.name,
        wrap=contestant.wrap,
        step=step,
        is_ready=contestant.is_ready,
        synchronize=contestant.synchronize,
        messages=contestant.messages,
        close=contestant.close,
    )


def averages(planners: Sequence[str]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the gradients after each step under some planners, and what they should be."""
    seen: dict[str, list[float]] = {}
    contestants = [stock_ddp()]
    contestants += [planned(plan_of(p, profile())) for p in planners]
    run_interleaved(
        profile(),
        [_watched(contestant, seen) for contestant in contestants],
        rounds=1,
        iterations=ITERATIONS,
        warmup=WARMUP,
    )
    return {
        name: (found, [averaged(t, i) for i in range(len(found) // 4) for t in range(4)])
        for name, found in seen.items()
    }


def turns() -> tuple[list[tuple[str, int, int, int]], dict[str, Any]]:
    """Return the order of the laps of three contestants, and what the laps hold."""
    told: list[tuple[str, int, int, int]] = []
    plan = plan_of("merge", profile())
    laps = run_interleaved(
        profile(),
        [stock_ddp(), stock_ddp("small", bucket_cap_mb=1e-4), planned(plan, "mine")],
        rounds=3,
        iterations=ITERATIONS,
        warmup=WARMUP,
        progress=lambda *lap: told.append(lap),
    )
    return told, {name: [to_plain(lap) for lap in of_one] for name, of_one in laps.items()}


def to_plain(lap: Any) -> dict[str, Any]:
    return {
        "iteration_s": lap.iteration_s,
        "settled_s": lap.settled_s,
        "steps": len(lap.steps_s),
        "idle_s": lap.idle_s,
        "timeline": lap.timeline.to_json(),
    }


def overlapped() -> tuple[list[str], float]:
    """Return the kinds of spans of laps whose exchange goes on under the forward pass."""
    plan = plan_of("tictac", profile(1.0))
    assert plan.wait == "need"
    # On a loaded machine, all messages of an iteration may be late, and none lie in it.
    laps = run_interleaved(
        profile(1.0), [planned(plan)], rounds=3, iterations=ITERATIONS, warmup=WARMUP
    )[plan.planner]
    return sorted({span.kind for lap in laps for span in lap.timeline.spans}), laps[0].iteration_s


def left_behind() -> tuple[set[str], int]:
    """Return threads and modules that a contest leaves."""
    before = {thread.name for thread in threading.enumerate()}
    plan = plan_of("tictac", profile())
    run_interleaved(profile(), [stock_ddp(), planned(plan)], rounds=2, iterations=1, warmup=WARMUP)
    gc.collect()
    modules = sum(type(thing) is Replayed for thing in gc.get_objects())
    return {thread.name for thread in threading.enumerate()} - before, modules


def refusals() -> list[str]:
    said = []
    for contestants, numbers in (
        ([], (1, 1, 1)),
        ([stock_ddp(), stock_ddp()], (1, 1, 1)),
        ([stock_ddp()], (1, 1, 0)),
    ):
        try:
            rounds, iterations, warmup = numbers
            run_interleaved(
                profile(), contestants, rounds=rounds, iterations=iterations, warmup=warmup
            )
        except UserError as error:
            said.append(str(error))
    return said


def never_ready() -> str:
    plain = stock_ddp()
    slow = Contestant(name="slow", wrap=plain.wrap, is_ready=lambda _: False)
    try:
        run_interleaved(profile(0.001), [slow], rounds=1, iterations=1, warmup=1)
    except UserError as error:
        return str(error)
    return ""


def unplannable() -> str:
    """Return how a plan is refused for gradients of several types, which DDP never merges."""
    mixed = profile(dtypes=("float32", "bfloat16", "float32", "float32"))
    plan = plan_of("wfbp", mixed)
    try:
        run_interleaved(mixed, [planned(plan)], rounds=1, iterations=1, warmup=WARMUP)
    except UserError as error:
        return str(error)
    return ""


def own_contestant() -> list[float]:
    """Let a contestant without any exchange take part, as a benchmark adds one."""
    closed: list[Any] = []

    def wrap(module: Replayed, optimizer: ReplayedOptimizer) -> tuple[Any, Any]:
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    alone = Contestant(name="alone", wrap=wrap, close=closed.append)
    [lap] = run_interleaved(profile(), [alone], rounds=1, iterations=3, warmup=1)["alone"]
    assert len(closed) == 1
    return [lap.iteration_s, lap.settled_s, lap.idle_s]
