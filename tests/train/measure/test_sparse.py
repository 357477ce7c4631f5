"""Measuring how fast a worker selects and merges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from syncline.plan.sparse_costs import SparseSpeeds
from syncline.train.measure import sparse


def test_every_speed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "ELEMENTS", 100_000)
    monkeypatch.setattr(sparse, "ENTRIES", 1000)
    found = sparse.sparse_speeds()
    for field in SparseSpeeds.__struct_fields__:
        value = getattr(found, field)
        assert math.isfinite(value)
        assert value > 0


def test_a_message_is_written_read_and_merged() -> None:
    """What is timed is not nothing: the random vectors are of the length that is asked for."""
    random = np.random.default_rng(0)
    assert sparse._merging_s(random, 100) > 0
    assert sparse._selecting_s(random, 100) > 0
