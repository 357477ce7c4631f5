"""``DistributedDataParallel(model, compression=...)`` over real process groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline.model.plan import Plan
from syncline.model.recipe import Recipe
from syncline.model.run import Run
from tests.parallel import compression_jobs as jobs
from tests.workers import WorkerPool

UNCHECKED = {"wrapper": {"check": False}}
KINDS: dict[str, tuple[str | dict[str, Any], dict[str, Any]]] = {
    "layer": ({"density": 0.05}, UNCHECKED),
    "overlap": ({"density": 0.05}, UNCHECKED | {"overlap": True}),
    "message": ({"density": 0.05, "unit": "message", "wire": "bfloat16"}, UNCHECKED),
    "model": ({"density": 0.05, "unit": "model"}, UNCHECKED),
    "partly dense": (
        {"density": 0.05, "dense_names": ("*.bias",), "algorithm": "gtop-k"},
        UNCHECKED,
    ),
    "bfloat16": ("bfloat16", UNCHECKED),
    "float16": ("float16", UNCHECKED | {"overlap": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_alike_and_nothing_is_lost(workers: WorkerPool, kind: str) -> None:
    """The check of conservation is on in every sparse exchange."""
    given, options = KINDS[kind]
    found = workers.run(jobs.trained, 2, given, "plain", options, 6)
    for name, values in found[0]["parameters"].items():
        np.testing.assert_array_equal(values, found[1]["parameters"][name])
    assert found[0]["finite"]
    plan = Plan.from_json(found[0]["plan"])
    assert plan.is_lossy
    run = Run.from_json(found[0]["run"])
    assert run.decision == "planned"
    assert run.sent is not None
    assert run.sent.steps > 6
    if isinstance(given, dict):
        assert run.compression == Recipe(**given)
        assert any(residual.any() for residual in found[0]["residuals"].values())
        assert run.sent.sent_bytes < run.sent.steps * run.sent.gradient_bytes / 2
