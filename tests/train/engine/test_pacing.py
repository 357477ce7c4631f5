"""Messages that follow each other closely."""

from __future__ import annotations

import math

from syncline.train.engine.pacing import LEAD_S, Pacing

MS = 1_000_000
LEAD = LEAD_S * 1e9


def paced(elements: list[int], last_steps: list[float], *passed: tuple[int, int, int]) -> Pacing:
    """Return the pacing of messages, some of which have passed: number, begin and end in ms."""
    pacing = Pacing(elements, last_steps)
    for message, begin_ms, end_ms in passed:
        pacing.sent(message, begin_ms * MS)
        pacing.completed(message, begin_ms * MS, end_ms * MS)
    return pacing


def test_the_first_message_goes_at_once_and_nothing_follows_it_before_it_is_complete() -> None:
    pacing = Pacing([10, 20], [0.01, 0.01])
    assert pacing.opens_ns() == 0
    pacing.sent(0, 5 * MS)
    assert pacing.opens_ns() == math.inf
    pacing.completed(0, 5 * MS, 15 * MS)
    assert pacing.opens_ns() <= 15 * MS


def test_a_message_follows_just_before_the_one_under_way_should_have_passed() -> None:
    pacing = paced([10, 20], [0.01, 0.01], (0, 0, 100))
    pacing.sent(0, 1000 * MS)
    assert pacing.opens_ns() == 1100 * MS - LEAD


def test_a_message_follows_in_the_last_step_of_a_long_one() -> None:
    pacing = paced([10, 20], [0.25, 0.5], (0, 0, 100))
    pacing.sent(0, 1000 * MS)
    assert pacing.opens_ns() == 1075 * MS
    pacing.sent(1, 1075 * MS)
    assert pacing.opens_ns() == 1200 * MS


def test_what_was_never_sent_is_judged_by_the_largest() -> None:
    pacing = paced([10, 20, 5], [0.01, 0.01, 0.01], (2, 0, 1), (0, 1, 101))
    pacing.sent(1, 200 * MS)
    assert pacing.opens_ns() == 400 * MS - LEAD


def test_two_under_way_pass_one_after_the_other() -> None:
    pacing = paced([10, 20], [0.01, 0.01], (0, 0, 100))
    pacing.sent(0, 1000 * MS)
    pacing.sent(1, 1097 * MS)
    assert pacing.opens_ns() == (1000 + 100 + 200) * MS - LEAD
    pacing.completed(0, 1000 * MS, 1110 * MS)  # later than was thought
    assert pacing.opens_ns() == 1320 * MS - LEAD  # and so may be the other
    pacing.completed(1, 1097 * MS, 1310 * MS)
    pacing.sent(1, 2000 * MS)
    assert pacing.opens_ns() == 2200 * MS - LEAD  # it had the line from 1110 on


def test_a_message_follows_once_the_transport_says_that_all_of_the_last_is_sent() -> None:
    pacing = Pacing([10, 20, 10], [None, None, 0.01])
    for begin_ms in (0, 1000):  # however long it took before
        pacing.sent(0, begin_ms * MS)
        assert pacing.opens_ns() == math.inf
        pacing.all_sent(0)
        assert pacing.opens_ns() == 0
        pacing.sent(1, (begin_ms + 1) * MS)
        assert pacing.opens_ns() == math.inf
        pacing.completed(0, begin_ms * MS, (begin_ms + 100) * MS)
        assert pacing.opens_ns() == math.inf
        pacing.all_sent(0)  # not the last one
        assert pacing.opens_ns() == math.inf
        pacing.completed(1, (begin_ms + 1) * MS, (begin_ms + 300) * MS)
        assert pacing.opens_ns() == 0
    # What follows is still behind both.
    pacing.sent(1, 2000 * MS)
    pacing.all_sent(1)
    pacing.sent(2, 2001 * MS)
    assert pacing.opens_ns() == (2000 + 200 + 100) * MS - LEAD


def test_one_slow_round_of_several_changes_nothing() -> None:
    rounds = [(0, 0, 100), (0, 1000, 1100), (0, 2000, 2900), (0, 3000, 3100)]
    pacing = paced([10], [0.01], *rounds)
    pacing.sent(0, 9000 * MS)
    assert pacing.opens_ns() == 9100 * MS - LEAD


def test_empty_messages_wait_for_nothing() -> None:
    pacing = paced([0, 0], [0.01, 0.01], (0, 0, 1))
    pacing.sent(1, 2 * MS)
    assert pacing.opens_ns() <= 2 * MS
