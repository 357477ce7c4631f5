"""Predictions and their table."""

from __future__ import annotations

import msgspec
import pytest

from syncline.errors import UserError
from tests.plan.documents import COMPARISON

ROW = COMPARISON.predictions[0]


@pytest.mark.parametrize(
    ("exposed_s", "communication_s", "expected"),
    [(1.0, 1.5, 2 / 3), (0.0, 1.5, 0.0), (2.0, 1.5, 1.0), (0.0, 0.0, 0.0)],
)
def test_the_exposed_share(exposed_s: float, communication_s: float, expected: float) -> None:
    row = msgspec.structs.replace(ROW, exposed_s=exposed_s, communication_s=communication_s)
    assert row.exposed_fraction == pytest.approx(expected)


def test_the_distance_to_the_bound() -> None:
    assert ROW.distance_to_bound == pytest.approx(2.0 / 1.5 - 1)
    assert msgspec.structs.replace(ROW, lower_bound_s=0.0).distance_to_bound == 0


def test_a_prediction_by_its_planner() -> None:
    assert COMPARISON.of("ddp") is ROW
    with pytest.raises(UserError, match="no prediction for planner 'merge'"):
        COMPARISON.of("merge")
