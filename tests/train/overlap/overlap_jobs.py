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
from syncline.train.ddp import DistributedDataParallel, planned_training
from tests.train.overlap.drawn_scripts import drawn
from tests.train.overlap.features import Feature, features
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


def beside_stock(
    rows: list[str], style: Style, let_through: float, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Run scripts under DDP and under the engine, and say how they differ."""
    return [_row_beside_stock(features()[row], style, let_through, steps) for row in rows]


def _row_beside_stock(row: Feature, style: Style, let_through: float, steps: int) -> dict[str, Any]:
    style = replace(style, norm=row.norm)
    return _beside_stock(row.script, style, let_through, near=row.near, steps=steps)


def sharded_beside_stock(
    rows: list[str], style: Style, let_through: float, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Do so with sharded optimizers; results may differ by 1e-6, or the reason may be said."""
    results = []
    for name in rows:
        row = features()[name]
        try:
            result = _beside_stock(
                row.script,
                replace(style, norm=row.norm),
                let_through,
                shard=True,
                near=True,
                steps=steps,
            )
        except UserError as error:
            result = {"refused": str(error)}
        results.append(result)
    return results


def drawn_beside_stock(numbers: list[int]) -> list[dict[str, Any]]:
    """Run scripts that are drawn at random, as :func:`beside_stock` runs those that are written."""
    results = []
    for number in numbers:
        script = drawn(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = _beside_stock(partial(_attempted, script), script.style, script.let_through)
        results.append(result)
    return results


def drawn_under_stock(number: int) -> None:
    """Run a script that is drawn at random under DDP alone; its exceptions are raised."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn(number)(Stock())


def _attempted(script: Script, side: Side) -> None:
    """Run a script; what it raises must be the same on both sides."""
    try:
        script(side)
    except Exception as error:
        side.note("raised", type(error).__name__)
        side.error = "".join(traceback.format_exception(error))


def guarded_beside_stock(rows: list[str], let_through: float) -> list[dict[str, Any]]:
    """Do so with the guard; also one script that needs it."""
    scripts = [*(features()[row].script for row in rows), by_group]
    return [_beside_stock(script, Style(), let_through, guard=True) for script in scripts]


def _beside_stock(
    script: Script,
    style: Style,
    let_through: float,
    *,
    guard: bool = False,
    shard: bool = False,
    near: bool = False,
    steps: int = STEPS,
) -> dict[str, Any]:
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


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def beside_oracle(
    plan_json: str | None, style: Style, let_through: float, optimizer: str, steps: int
) -> dict[str, Any]:
    """Train under a plan beside a twin that exchanges the same messages synchronously.

    Args:
        plan_json: for the model ``Net``; None to make one of the style.
        style: how to make it.
        let_through: the part of each round's messages that lands before ``backward`` ends.
        optimizer: of both.
        steps: to train after the engine has begun to run.

    Returns:
        What differs from the twin; a fingerprint of the parameters; what happened.
    """
    torch.manual_seed(1)
    net = Net()
    side = Ours(style)
    with holding(let_through), side.observed():
        if plan_json is None:
            ddp = side.wrap(net, loss_of)
        else:
            ddp = DistributedDataParallel(net, plan=Plan.from_json(plan_json), check=False)
            side.wrapped.append(ddp)
        ours = side.overlap(ddp, MAKERS[optimizer](ddp.parameters()))
        twin, theirs = None, None
        for side.step in range(STEADY + steps):
            if side.step == STEADY:
                twin = copy.deepcopy(net)
                theirs = MAKERS[optimizer](twin.parameters())
                theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
            side.note("loss", train_step(ddp, ours, side.step))
            if twin is not None:
                theirs.zero_grad()
                loss = loss_of(twin, side.step)
                loss.backward()
                average(dict(twin.named_parameters()), ddp.plan)
                theirs.step()
                if fingerprint([loss]) != side.trace[-1][1]:
                    return {"differences": [f"loss of step {side.step}"], "happened": side.happened}
        pairs = zip(net.state_dict().items(), twin.state_dict().values(), strict=True)
        result = {
            "differences": [name for (name, ours), other in pairs if not torch.equal(ours, other)],
            "parameters": fingerprint(list(net.parameters())),
            "happened": side.happened,
            "plan": ddp.plan is not None and planned_training(ddp).reducer.executor.mismatch,
        }
        side.close()
    return result


def train_step(ddp: Any, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    """Train one step and return the loss."""
    optimizer.zero_grad()
    loss = loss_of(ddp, step)
    loss.backward()
    optimizer.step()
    return loss
