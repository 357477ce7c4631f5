"""A replay as one could have been measured, for tests of what is made of it."""

from __future__ import annotations

import msgspec

from syncline.lab.replay.result import PlanTimes, Replay
from syncline.lab.replay.session import ReplayOutcome
from syncline.plan.network import Network
from syncline.plan.planners import planner_named
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.transformations import with_compute_scale
from syncline.plan.timeline import Timeline

ROUNDS_S = {"ddp": (0.13, 0.12, 0.14), "merge": (0.11, 0.1, 0.125), "tictac": (0.104, 0.102, 0.1)}


def layers(
    *,
    need: tuple[int | None, ...] = (2, 1, 1, 0),
    ready: tuple[int, ...] = (3, 4, 4, 5),
    names: tuple[str, ...] = ("c.weight", "b.weight", "b.bias", "a.weight"),
    dtypes: tuple[str, ...] = ("float32",) * 4,
) -> Profile:
    """Return three forward operations of 10 ms, three backward ones of 20 ms and an update."""
    operations = [
        *(Operation(name=f"f{i}", phase="forward", duration_s=0.01) for i in range(3)),
        *(Operation(name=f"b{i}", phase="backward", duration_s=0.02) for i in range(3)),
        Operation(name="tail", phase="backward", duration_s=0.003),
        Operation(name="update", phase="update", duration_s=0.004),
    ]
    return Profile(
        model="layers",
        device="cpu",
        workers=2,
        iterations=1,
        operations=tuple(operations),
        gradients=tuple(
            Gradient(name=n, elements=10 * (i + 1), dtype=d, ready_after=r, needed_by=q)
            for i, (n, d, r, q) in enumerate(zip(names, dtypes, ready, need, strict=True))
        ),
    )


PROFILE = with_compute_scale(layers(names=("c", "b x/y", "half", "a.b.c")), 0.05)
"""It takes 5 ms an iteration, and has names that torch refuses."""


def entry(planner: str = "ddp", **changes: object) -> PlanTimes:
    rounds_s = ROUNDS_S[planner]
    fields = {
        "planner": planner,
        "messages": 2,
        "in_flight": 1,
        "wait": "update",
        "predicted_s": 0.12,
        "lower_bound_s": 0.1,
        "rounds_s": rounds_s,
        "settled_s": tuple(s + 0.01 for s in rounds_s),
        "idle_s": (0.02, 0.01, 0.03),
        "iterations_s": tuple((s, s) for s in rounds_s),
    }
    return PlanTimes(**{**fields, **changes})  # type: ignore[arg-type]


def replay(**changes: object) -> Replay:
    fields = {
        "model": "layers",
        "cluster": "2 hosts, 1 worker each, links 1 Gbit/s",
        "network": "probed",
        "workers": 2,
        "machine": "a processor, 2 cores",
        "warmup": 3,
        "iterations": 2,
        "computation_s": 0.097,
        "gradient_bytes": 400,
        "entries": tuple(map(entry, ROUNDS_S)),
    }
    return Replay(**{**fields, **changes})  # type: ignore[arg-type]


def outcome(found: Replay | None = None, profile: Profile | None = None) -> ReplayOutcome:
    """Return all that a replay of the profile of three layers finds."""
    found = found or replay()
    profile = profile or layers()
    network = Network.line(workers=2, a_s=1e-3, b_s_per_byte=1e-4, name="probed")
    plans = tuple(planner_named(name).plan(profile, network) for name in ROUNDS_S)
    forecasts = tuple(predict(profile, network, plan) for plan in plans)
    measured = (msgspec.structs.replace(f.timeline, source="measured") for f in forecasts)
    timelines: tuple[Timeline, ...] = tuple(measured)
    return ReplayOutcome(found, profile, network, plans, forecasts, timelines)
