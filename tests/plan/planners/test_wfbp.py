"""A message a tensor, and everything in one message."""

from __future__ import annotations

import pytest

from syncline.plan.network import PRESETS
from syncline.plan.planners.base import Planner
from syncline.plan.planners.wfbp import Single, Wfbp
from tests import strategies as some


@pytest.mark.parametrize(
    ("planner", "elements", "messages"),
    [
        (Wfbp(), [3, 4, 5], [(0, 3), (3, 7), (7, 12)]),
        (Wfbp(), [3, 0, 5], [(0, 3), (3, 8)]),  # a tensor without elements is not sent
        (Single(), [3, 4, 5], [(0, 12)]),
    ],
)
def test_messages(planner: Planner, elements: list[int], messages: list[tuple[int, int]]) -> None:
    plan = planner.plan(some.profile_of([1, 1, 1], elements), PRESETS["10gbe-k80"])
    assert [(m.start, m.stop) for m in plan.messages] == messages
