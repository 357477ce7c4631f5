"""Training with ``compression=``, as worker processes run it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from syncline.model.recipe import Compression, Recipe
from syncline.parallel.ddp import DistributedDataParallel
from tests.parallel.jobs import OPTIMIZERS, steps_to_steady, train
from tests.parallel.models import MODELS


def compression_of(given: str | dict[str, Any]) -> Compression:
    return Recipe(**given) if isinstance(given, dict) else given  # type: ignore[return-value]


def checked_conservation(ddp: DistributedDataParallel) -> None:
    """Let every sparse exchange be checked."""
    assert ddp._compressing is not None
    session = ddp._compressing._session
    if session is not None:
        session.reducer._check = True


def trained(
    given: str | dict[str, Any], model: str, options: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Train until measuring is over, and on."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(
        MODELS[model](), compression=compression_of(given), **options.get("wrapper", {})
    )
    checked_conservation(ddp)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    if options.get("overlap"):
        ddp.overlap(optimizer)
    before = steps_to_steady(ddp, optimizer) if ddp.measuring else 0
    train(ddp, optimizer, steps, first=before)
    state = ddp.compression_state_dict()
    run = ddp.run_record()
    return {
        "parameters": {n: p.detach().numpy().copy() for n, p in ddp.module.named_parameters()},
        "residuals": {n: r.numpy() for n, r in state.get("residuals", {}).items()},
        "plan": None if ddp.plan is None else ddp.plan.to_json(),
        "run": run.to_json(),
        "state": {k: v for k, v in state.items() if k not in ("residuals", "velocities")},
        "finite": all(bool(np.isfinite(p.detach().numpy()).all()) for p in ddp.parameters()),
    }
