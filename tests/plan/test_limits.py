"""The largest values that are accepted are also ones that can be simulated."""

from __future__ import annotations

import math

import pytest

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.planners import PLANNERS, Planner
from syncline.plan.quantities import LARGEST_BYTES, LONGEST_NS, require_time
from syncline.plan.simulator.predict import predict
from tests import strategies as some


def test_times() -> None:
    for seconds in (0.0, 1e-12, LONGEST_NS / 1e9):
        require_time("it", seconds)
    for seconds in (-1e-12, math.nan, math.inf, -math.inf, LONGEST_NS / 1e9 + 1):
        with pytest.raises(UserError, match=r"^it (must be a finite time|is 7.*longer than)"):
            require_time("it", seconds)


@pytest.mark.parametrize(  # overlap refuses times by itself: see test_overlap
    "planner", [p for p in PLANNERS.values() if p.NAME != "overlap"], ids=lambda p: p.NAME
)
def test_the_largest_profile_is_planned_or_refused(planner: Planner) -> None:
    profile = some.profile_of([LONGEST_NS // 2] * 2, [LARGEST_BYTES // 8] * 2)
    assert profile.gradient_bytes == LARGEST_BYTES
    free = Network.line(workers=4, a_s=0, b_s_per_byte=0)
    if planner.NAME in ("p3", "bytescheduler"):
        with pytest.raises(UserError, match="messages, at most 131072 can be planned"):
            planner.plan(profile, free)
        return
    cycle_s = 1e-3 if planner.NAME == "horovod" else 0
    iteration_s = predict(profile, free, planner.plan(profile, free)).prediction.iteration_s
    assert LONGEST_NS / 1e9 <= iteration_s <= LONGEST_NS / 1e9 + cycle_s
    slow = Network.line(workers=4, a_s=1e300, b_s_per_byte=1e300)
    with pytest.raises(UserError, match="'line': the messages of one iteration take longer than"):
        predict(profile, slow, planner.plan(profile, slow))
