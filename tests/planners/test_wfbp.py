"""A message a tensor."""

from __future__ import annotations

from syncline.model.network import PRESETS
from syncline.planners.wfbp import Wfbp
from tests import strategies as some


def test_every_tensor_by_itself() -> None:
    plan = Wfbp().plan(some.profile_of([1, 1, 1], [3, 4, 5]), PRESETS["10gbe-k80"])
    assert [(m.start, m.stop) for m in plan.messages] == [(0, 3), (3, 7), (7, 12)]


def test_a_tensor_without_elements_is_not_sent() -> None:
    plan = Wfbp().plan(some.profile_of([1, 1, 1], [3, 0, 5]), PRESETS["10gbe-k80"])
    assert [(m.start, m.stop) for m in plan.messages] == [(0, 3), (3, 8)]
