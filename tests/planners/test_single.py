"""Everything in one message."""

from __future__ import annotations

from syncline.model.network import PRESETS
from syncline.planners.wfbp import Single
from tests import strategies as some


def test_one_message_over_all() -> None:
    plan = Single().plan(some.profile_of([1, 1, 1], [3, 4, 5]), PRESETS["10gbe-k80"])
    assert [(m.start, m.stop) for m in plan.messages] == [(0, 12)]
