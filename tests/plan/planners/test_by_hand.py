"""Plans of small instances by hand: their messages in order, and the iteration time."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from syncline.plan.planners import Planner
from syncline.plan.planners.bytescheduler import ByteScheduler
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.dear import Dear
from syncline.plan.planners.horovod import Buckets, Horovod
from syncline.plan.planners.overlap import Overlap
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.pace import Pace
from syncline.plan.planners.tictac import TicTac
from syncline.plan.planners.wfbp import Single, Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s
from tests import strategies as some
from tests.plan.planners.instances import FIGURE_2, UNIT_LINE, chain, spans


def at_once(elements: list[int], *dtypes: str) -> Profile:
    """Return a chain whose gradients are all ready at 1 s."""
    count = len(elements)
    return chain([1, *[0] * (count - 1)], elements, [0] * count, dtypes)


class Case(NamedTuple):
    planner: Planner
    profile: Profile
    spans: list[tuple[int, int]]
    iteration_s: float
    in_flight: int = 1


ONE_BY_ONE = [(0, 1), (4, 5), (6, 7), (5, 6), (1, 2), (2, 3), (3, 4)]
TWO_AT_ONCE = [(0, 1), (1, 2), (4, 5), (6, 7), (5, 6), (2, 3), (3, 4)]
DEAR = [(0, 4), (4, 6), (6, 8), (6, 8), (4, 6), (0, 4)]
UP_TO_16, FROM_20 = [(0, 2), (2, 5), (5, 14), (14, 16)], [(0, 2), (2, 7), (7, 13), (13, 16)]
MIXED = at_once([1, 2, 1, 1], "float32", "float32", "bfloat16", "float32")
CASES = [
    Case(Wfbp(), FIGURE_2, [(0, 4), (4, 6), (6, 7)], 12),
    Case(Single(), FIGURE_2, [(0, 7)], 14),
    # A tensor without elements is not sent by itself, but with the one before.
    Case(Wfbp(), chain([1, 1, 1], [3, 0, 5], [1, 1, 1]), [(0, 3), (3, 8)], 13),
    Case(TicTac(), chain([1] * 4, [0, 3, 0, 2], [1, 1, 1, 1]), [(0, 3), (3, 5)], 12),
    # 4 + 4, + 12 would be 20; 12, + 36 would be 48; 36 is over by itself; 4 + 4.
    Case(Buckets(threshold_bytes=16), at_once([1, 1, 3, 9, 1, 1]), UP_TO_16, 17),
    # A bucket closes once it holds at least its cap: 4 + 4 = 8; 16 + 4 = 20; 24; 8 + 4 is left.
    Case(Ddp(first_bucket_bytes=8, bucket_bytes=20), at_once([1, 1, 4, 1, 6, 2, 1]), FROM_20, 17),
    # AR_1 from 1 to 5; then AR_3, ready since 3, goes before AR_2, ready since 2. f1 needs AR_3 at
    # 6 and runs to 8; f2 needs AR_2 at 8 and runs to 9; f3 to 10.
    Case(TicTac(), FIGURE_2, [(0, 4), (6, 7), (4, 6)], 10),
    # If no need is known, the input comes first.
    Case(TicTac(), some.profile_of([5, 5, 5], [1, 1, 1]), [(0, 1), (2, 3), (1, 2)], 3 + 5e-9),
    # With slices of an element and no latency P3 comes to the preemptive optimum, 9.
    Case(P3(slice_elements=1), FIGURE_2, ONE_BY_ONE, 9),
    Case(ByteScheduler(partition_elements=1, credit_elements=1), FIGURE_2, ONE_BY_ONE, 9),
    # MXNet's slices.
    Case(P3(), chain([1], [50_000], [1]), [(0, 40_000), (40_000, 50_000)], 50_002),
    # At 1 two slices of AR_1 leave. Each arrival lets another go: at 2 one of AR_2, ready then.
    # AR_3, ready at 3, is the fourth and arrives at 5, a second later than by itself. AR_2 arrives
    # at 6 and AR_1 at 8: the layers run from 5 to 7, 7 to 8 and 8 to 9.
    Case(ByteScheduler(partition_elements=1, credit_elements=2), FIGURE_2, TWO_AT_ONCE, 9, 2),
    # Wfbp, in ready order, takes 12: PACE's "25% reduction of DAG execution time".
    Case(Pace(), FIGURE_2, [(0, 1), (4, 5), (6, 7), (5, 6), (1, 4)], 9),
    # 2.5 s of 10 s are sent before the second tensor interrupts: 2.5 of 10 elements, so 2.
    Case(Pace(), chain([1, 2.5], [10, 1], [5, 1]), [(0, 2), (10, 11), (2, 10)], 13.5),
    # A piece of less than an element goes with the next.
    Case(Pace(), chain([1, 0.5], [10, 1], [5, 1]), [(10, 11), (0, 10)], 13.5),
    # Scattered 1-3, 3-4, 4-5; gathered 5-6, 6-7, 7-9. The first layer runs from 6 to 8, the second
    # to 9, the third to 10, and then the backward pass begins again.
    Case(Dear(bucket_bytes=0), chain([1, 1, 1], [4, 2, 2], [2, 1, 1]), DEAR, 10),
    Case(Horovod(threshold_bytes=0), at_once([1, 2, 1]), [(0, 1), (1, 3), (3, 4)], 5),
    Case(Horovod(threshold_bytes=11), at_once([1, 2, 1]), [(0, 1), (1, 3), (3, 4)], 5),
    Case(Horovod(threshold_bytes=12), at_once([1, 2, 1]), [(0, 3), (3, 4)], 5),
    Case(Horovod(threshold_bytes=16), at_once([1, 2, 1]), [(0, 4)], 5),
    # A tick fuses each dtype by itself.
    Case(Horovod(), MIXED, [(0, 4), (4, 5)], 5.5),
    # Without a cycle, what is ready at once is fused.
    Case(Horovod(cycle_s=0), chain([1, 0, 1], [1, 2, 1], [0, 0, 0]), [(0, 3), (3, 4)], 5),
    Case(Overlap(), at_once([0, 0]), [(0, 0)], 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.planner.NAME)
def test_messages_and_time(case: Case) -> None:
    plan = case.planner.plan(case.profile, UNIT_LINE)
    assert spans(plan) == case.spans
    assert plan.in_flight == case.in_flight
    waits = isinstance(case.planner, TicTac | P3 | ByteScheduler | Pace | Dear | Overlap)
    assert plan.wait == ("need" if waits else "update")
    found_s = predict_iteration_s(case.profile, UNIT_LINE, plan)
    assert found_s == pytest.approx(case.iteration_s, abs=1e-9)
