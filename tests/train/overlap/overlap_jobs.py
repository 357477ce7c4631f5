"""What the workers of the overlap tests run."""

from __future__ import annotations

import copy
import traceback
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from syncline.errors import UserError
from syncline.plan.plan import Plan
from syncline.train.ddp import planned_training
from tests.train.overlap.drawn_scripts import drawn
from tests.train.overlap.features import features
from tests.train.overlap.loop import MAKERS, Loop
from tests.train.overlap.overlap_blind_spots import by_group
from tests.train.overlap.overlap_models import Net, loss_of
from tests.train.overlap.overlap_oracle import average
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import (
    STEADY,
    STEPS,
    Ours,
    Script,
    Side,
    Stock,
    differences,
    fingerprint,
    holding,
)
from tests.train.overlap.parts import backward, step, zero


def beside_ddp(
    rows: list[str], style: Style, let_through: float, steps: int = STEPS, **kind: bool
) -> list[dict[str, Any]]:
    """Run scripts under DDP and under the engine, and say how they differ."""
    results = []
    for row in map(features().__getitem__, rows):
        near, planned = row.near or kind.get("shard", False), replace(style, norm=row.norm)
        how: dict[str, Any] = {"near": near, "steps": steps} | kind
        results.append(script_beside_ddp(row.script, planned, let_through, **how))
    return results


def sharded_beside_ddp(rows: list[str], style: Style, *how: Any) -> list[dict[str, Any]]:
    """Do so with sharded optimizers; results may differ by 1e-6, or the reason may be said."""
    results = []
    for row in rows:
        try:
            results += beside_ddp([row], style, *how, shard=True)
        except UserError as error:
            results.append({"refused": str(error)})
    return results


def guarded_beside_ddp(rows: list[str], let_through: float) -> list[dict[str, Any]]:
    """Do so with the guard; also one script that needs it."""
    needing = script_beside_ddp(by_group.script, Style(), let_through, guard=True)
    return [*beside_ddp(rows, Style(), let_through, guard=True), needing]


def drawn_beside_ddp(numbers: list[int]) -> list[dict[str, Any]]:
    """Run scripts that are drawn at random, as :func:`beside_ddp` runs those that are written."""
    results = []
    for script in map(drawn, numbers):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tried = partial(attempted, script)
            results.append(script_beside_ddp(tried, script.style, script.let_through))
    return results


def drawn_under_ddp(number: int) -> None:
    """Run a script that is drawn at random under DDP alone; its exceptions are raised."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn(number)(Stock())


def attempted(script: Script, side: Side) -> None:
    """Run a script; what it raises must be the same on both sides."""
    try:
        script(side)
    except Exception as error:
        side.note("raised", type(error).__name__)
        side.error = "".join(traceback.format_exception(error))


def script_beside_ddp(
    script: Script,
    style: Style,
    let_through: float,
    *,
    guard: bool = False,
    shard: bool = False,
    near: bool = False,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Run a script under both, and say how results differ and what happened to updates."""
    sides = Ours(style, guard=guard, shard=shard), Stock(style.wire)
    for side in sides:
        side.near, side.length, side.shard = near, steps, shard
        torch.manual_seed(1)
        with holding(let_through), sides[0].observed():
            script(side)
            side.close()
    return {
        "differences": differences(*sides),
        "happened": sides[0].happened,
        "errors": [side.error for side in sides],
        "parameters": fingerprint([list(ddp.parameters()) for ddp in sides[0].wrapped]),
    }


def beside_oracle(
    plan_json: str | None, style: Style, let_through: float, optimizer: str, steps: int
) -> dict[str, Any]:
    """Train under a plan beside a twin that exchanges the same messages synchronously.

    The plan is for ``Net``, or made in this style. ``steps`` come after the engine has begun.
    """
    torch.manual_seed(1)
    net, side = Net(), Ours(style)
    if plan_json is not None:
        side.plans = {"plan": Plan.from_json(plan_json), "check": False}
    with holding(let_through), side.observed():
        t = Loop(model=lambda: net, make=MAKERS[optimizer]).begin(side)
        twin, theirs = None, None
        for side.step in range(STEADY + steps):
            if side.step == STEADY:
                twin = copy.deepcopy(net)
                theirs = MAKERS[optimizer](twin.parameters())
                theirs.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))
            for part in zero, backward, step:
                part(t)
            if twin is not None:
                theirs.zero_grad()
                loss = loss_of(twin, side.step)
                loss.backward()
                average(dict(twin.named_parameters()), t.ddp.plan)
                theirs.step()
                if fingerprint([loss]) != side.trace[-1][1]:
                    return {"differences": [f"loss of step {side.step}"], "happened": side.happened}
        pairs = zip(net.state_dict().items(), twin.state_dict().values(), strict=True)
        result = {
            "differences": [name for (name, ours), other in pairs if not torch.equal(ours, other)],
            "parameters": fingerprint(list(net.parameters())),
            "happened": side.happened,
            "plan": t.ddp.plan is not None and planned_training(t.ddp).reducer.executor.mismatch,
        }
        side.close()
    return result
