"""The preemptive order: by hand, against a slot-by-slot rule, and against the linear program."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from syncline import _native
from syncline.plan.planners.pace import preemptive_order
from tests import strategies as some
from tests.plan.planners.time_slots import SlotJob, least_end, least_end_by_weights

jobs = st.builds(SlotJob, ready=st.integers(0, 12), cost=st.integers(0, 6), tail=st.integers(0, 15))
jobs_of_slots = st.lists(jobs, min_size=1, max_size=8)


def order_of(jobs: list[SlotJob]) -> tuple[int, list[tuple[int, int, int]]]:
    ready, cost, tail = (list(column) for column in zip(*jobs, strict=True))
    return preemptive_order(ready, cost, tail)


def by_hand(jobs: list[SlotJob]) -> int:
    """Send slot by slot whichever ready job has the longest tail."""
    left = [job.cost for job in jobs]
    end = max((job.ready + job.tail for job in jobs if not job.cost), default=0)
    for slot in itertools.count():
        if not any(left):
            return end
        ready = [i for i, job in enumerate(jobs) if left[i] and job.ready <= slot]
        if ready:
            chosen = max(ready, key=lambda i: jobs[i].tail)
            left[chosen] -= 1
            if not left[chosen]:
                end = max(end, slot + 1 + jobs[chosen].tail)
    raise AssertionError


def test_figure_2_of_pace() -> None:
    # AR_1 is long and ready first, AR_2 and AR_3 are needed before it: 9 instead of FIFO's 12.
    jobs = [SlotJob(1, 4, 1), SlotJob(2, 2, 2), SlotJob(3, 1, 4)]
    end, pieces = order_of(jobs)
    assert end == 9
    assert pieces == [(0, 1, 2), (1, 2, 3), (2, 3, 4), (1, 4, 5), (0, 5, 8)]


@some.many
@given(jobs_of_slots)
@example([SlotJob(0, 0, 0)])
@example([SlotJob(5, 0, 9), SlotJob(0, 9, 0)])
@example([SlotJob(0, 3, 5), SlotJob(1, 0, 5), SlotJob(1, 2, 9)])
def test_the_pieces_are_a_schedule(jobs: list[SlotJob]) -> None:
    end, pieces = order_of(jobs)
    assert len(pieces) < 2 * len(jobs)
    assert all(stop <= start for (*_, stop), (_, start, _) in itertools.pairwise(pieces))
    for index, job in enumerate(jobs):
        own = [(start, stop) for piece, start, stop in pieces if piece == index]
        assert own[0][0] >= job.ready
        assert sum(stop - start for start, stop in own) == job.cost
    assert end == max(stop + jobs[index].tail for index, _, stop in pieces)
    # All times are whole slots, so it ends when the linear program does, not only to within one.
    assert end == by_hand(jobs) == least_end(jobs)


def test_equation_14_with_its_weights_on_a_tiny_instance() -> None:
    jobs = [SlotJob(0, 3, 0), SlotJob(1, 1, 2), SlotJob(2, 1, 1)]
    assert least_end_by_weights(jobs) == least_end(jobs) == order_of(jobs)[0] == 5


def test_what_is_no_instance() -> None:
    for ready, cost, tail in (([-1], [0], [0]), ([0], [-1], [0]), ([0], [0], [1 << 62])):
        with pytest.raises(ValueError, match="negative or too long"):
            _native.preemptive_order(ready, cost, tail)
    with pytest.raises(ValueError, match="as many costs and tails"):
        _native.preemptive_order([0], [0, 1], [0])
    many = [0] * ((1 << 14) + 1)
    with pytest.raises(ValueError, match="too many jobs"):
        _native.preemptive_order(many, many, many)
    assert _native.preemptive_order([], [], []) == (0, [])
