"""Presets by name, and what a strategy refuses."""

from __future__ import annotations

import pytest

from syncline.errors import UserError
from syncline.plan.simulator.strategy import STRATEGIES, Strategy, strategy_named


def test_presets() -> None:
    assert all(strategy.name == name for name, strategy in STRATEGIES.items())
    assert strategy_named("caffe-mpi").prefetch_copy
    with pytest.raises(UserError, match=r"unknown strategy 'cafe-mpi'.*caffe-mpi"):
        strategy_named("cafe-mpi")


@pytest.mark.parametrize("field", ["loaders", "ahead"])
def test_what_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=f"strategy 's': {field} must be at least 1, found 0"):
        Strategy(name="s", **{field: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loaders": 2}, "loaders has no effect without prefetch_data"),
        ({"prefetch_data": True, "one_loader": True}, "one_loader has no effect without"),
    ],
)
def test_options_that_would_do_nothing(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Strategy(name="s", **fields)  # type: ignore[arg-type]
