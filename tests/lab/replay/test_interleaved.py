"""Contestants exchange real gradients in turns, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from syncline.errors import UserError
from syncline.lab.replay import interleaved
from syncline.lab.replay.interleaved import Contestant, ddp_baseline, planned, run_interleaved
from syncline.lab.replay.job import Lap
from syncline.lab.replay.model import Replayed, ReplayedOptimizer, gradient_value
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planner_named
from syncline.plan.profile import Profile
from syncline.plan.simulator.transformations import with_compute_scale
from tests.cases import first_few
from tests.lab.replay.examples import layers
from tests.workers import WorkerPool

WARMUP, ITERATIONS = 3, 2


def plan_of(planner: str, profile: Profile) -> Plan:
    network = Network.line(workers=dist.get_world_size(), a_s=1e-4, b_s_per_byte=1e-7)
    return planner_named(planner).plan(profile, network)


def profile(scale: float = 0.05, **changes: Any) -> Profile:
    """Return the profile of three layers, which takes 5 ms an iteration."""
    return with_compute_scale(layers(**changes), scale)


def contest(
    *contestants: Contestant, scale: float = 0.05, rounds: int = 1, **options: Any
) -> dict[str, tuple[Lap, ...]]:
    given = {"iterations": ITERATIONS, "warmup": WARMUP} | options
    return run_interleaved(profile(scale), contestants, rounds=rounds, **given)


def averaged(tensor: int, iteration: int) -> float:
    ranks = range(dist.get_world_size())
    return sum(gradient_value(rank, iteration, tensor) for rank in ranks) / len(ranks)


def watched(contestant: Contestant, seen: dict[str, list[float]]) -> Contestant:
    """Return a contestant whose gradients are noted when all is settled."""

    def step(model: Any, optimizer: Any) -> None:
        interleaved.train_step(model, optimizer)
        module: Replayed = model.module
        contestant.synchronize(model)
        named = dict(module.named_parameters())
        gradients = [named[g.name].grad for g in module.profile.gradients]
        seen.setdefault(contestant.name, []).extend(float(g.flatten()[0]) for g in gradients)
        # Thirds are rounded in another order in each part of a message.
        assert all(torch.allclose(g, g.flatten()[0]) for g in gradients)

    return dataclasses.replace(contestant, step=step)


def averages(planners: Sequence[str]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the gradients after each step under some planners, and what they should be."""
    seen: dict[str, list[float]] = {}
    contestants = [ddp_baseline(), *(planned(plan_of(p, profile())) for p in planners)]
    contest(*(watched(contestant, seen) for contestant in contestants))
    return {
        name: (found, [averaged(t, i) for i in range(len(found) // 4) for t in range(4)])
        for name, found in seen.items()
    }


def turns() -> tuple[list[tuple[str, int, int, int]], dict[str, tuple[Lap, ...]]]:
    """Return the order of the laps of three contestants, and the laps."""
    told: list[tuple[str, int, int, int]] = []
    plan = plan_of("merge", profile())
    three = (ddp_baseline(), ddp_baseline("small", bucket_cap_mb=1e-4), planned(plan, "mine"))
    return told, contest(*three, rounds=3, progress=lambda *lap: told.append(lap))


def overlapped() -> tuple[Lap, ...]:
    """Return laps whose exchange goes on under the forward pass."""
    plan = plan_of("tictac", profile(1.0))
    assert plan.wait == "need"
    # On a loaded machine, all messages of an iteration may be late, and none lie in it.
    (laps,) = contest(planned(plan), scale=1.0, rounds=3).values()
    return laps


def left_behind() -> tuple[set[str], int]:
    """Return threads and modules that a contest leaves."""
    before = {thread.name for thread in threading.enumerate()}
    plan = plan_of("tictac", profile())
    contest(ddp_baseline(), planned(plan), rounds=2, iterations=1)
    gc.collect()
    modules = sum(type(thing) is Replayed for thing in gc.get_objects())
    return {thread.name for thread in threading.enumerate()} - before, modules


def refused(case: str) -> str:
    plain, run = ddp_baseline(), profile(0.001)
    mixed = profile(dtypes=("float32", "bfloat16", "float32", "float32"))
    *others, last = mixed.gradients
    empty = msgspec.structs.replace(last, elements=0)
    mixed = msgspec.structs.replace(mixed, gradients=(*others, empty))
    cases: dict[str, tuple[Profile, list[Contestant], int]] = {
        "no contestants": (run, [], 1),
        "equal names": (run, [plain, plain], 1),
        "no warmup": (run, [plain], 0),
        "never ready": (run, [dataclasses.replace(plain, is_ready=lambda _: False)], 1),
        # Of several dtypes, and one gradient has no element.
        "unplannable": (mixed, [planned(plan_of("wfbp", mixed))], WARMUP),
    }
    replayed, contestants, warmup = cases[case]
    with pytest.raises(UserError) as error:
        run_interleaved(replayed, contestants, rounds=1, iterations=1, warmup=warmup)
    return str(error.value)


def own_contestant() -> tuple[Lap, ...]:
    """Let a contestant without any exchange take part, as a benchmark adds one."""
    closed: list[Any] = []

    def wrap(module: Replayed, optimizer: ReplayedOptimizer) -> tuple[Any, Any]:
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    alone = Contestant(name="alone", wrap=wrap, close=closed.append)
    laps = contest(alone, iterations=3, warmup=1)["alone"]
    assert len(closed) == 1
    return laps


PLANNERS = ("wfbp", "p3", "dear")
"""A plan that is buckets, one of pieces by need, and one that is decoupled."""
OTHERS = ("single", "merge", "horovod", "tictac", "overlap")


@pytest.mark.parametrize(
    ("ranks", "planners"), first_few([(3, PLANNERS), (3, OTHERS), (2, PLANNERS), (2, OTHERS)])
)
def test_all_average_gradients(workers: WorkerPool, ranks: int, planners: tuple[str, ...]) -> None:
    for seen in workers.run(averages, ranks, planners):
        assert seen.keys() == {"ddp", *planners}
        for name, (gradients, expected) in seen.items():
            assert len(gradients) >= 4 * (WARMUP + ITERATIONS)
            assert gradients == pytest.approx(expected), name


def test_turns_and_laps(workers: WorkerPool) -> None:
    (told, laps), (_, others) = workers.run(turns, 2)
    assert " ".join(name for name, *_ in told) == "ddp small mine small mine ddp mine ddp small"
    assert [lap[1:] for lap in told] == [(i // 3, i + 1, 9) for i in range(9)]
    assert laps.keys() == {"ddp", "small", "mine"}
    for name, of_one in laps.items():
        assert len(of_one) == 3
        for lap, other in zip(of_one, others[name], strict=True):
            assert 0 < lap.iteration_s <= lap.settled_s
            assert lap.idle_s >= 0
            assert len(lap.steps_s) == ITERATIONS
            assert lap.iteration_s == other.iteration_s
            assert lap.timeline.name == name
            assert {"forward", "backward", "update"} <= {span.kind for span in lap.timeline.spans}


def test_an_exchange_under_the_forward_pass(workers: WorkerPool) -> None:
    for laps in workers.run(overlapped, 2):
        kinds = {span.kind for lap in laps for span in lap.timeline.spans}
        assert {"forward", "backward", "update", "message"} <= kinds
        assert laps[0].iteration_s > 0


def test_nothing_is_left(workers: WorkerPool) -> None:
    assert workers.run(left_behind, 2) == [(set(), 0)] * 2


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no contestants", "different names, found []"),
        ("equal names", "different names, found ['ddp', 'ddp']"),
        ("no warmup", "warmup must be at least 1, found 0"),
        ("never ready", "contestant 'ddp' was not ready after 100 iterations"),
        ("unplannable", "the plan of 'wfbp' did not run: "),
    ],
)
def test_bad_contests(workers: WorkerPool, case: str, said: str) -> None:
    for error in workers.run(refused, 2, case):
        assert said in error


def test_a_contestant_of_ones_own(workers: WorkerPool) -> None:
    for (lap,) in workers.run(own_contestant, 2):
        assert 0 < lap.iteration_s <= lap.settled_s
        assert lap.idle_s >= 0
