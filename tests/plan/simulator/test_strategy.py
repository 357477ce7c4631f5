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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loaders": 0}, "strategy 's': loaders must be at least 1, found 0"),
        ({"ahead": 0}, "strategy 's': ahead must be at least 1, found 0"),
        ({"loaders": 2}, "loaders has no effect without prefetch_data"),
        ({"prefetch_data": True, "one_loader": True}, "one_loader has no effect without"),
    ],
)
def test_what_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Strategy(name="s", **fields)  # type: ignore[arg-type]
