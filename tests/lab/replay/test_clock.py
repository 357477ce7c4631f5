"""The emulated device: a queue in which only real waiting leaves a gap."""

from __future__ import annotations

import itertools
import time

import pytest

from syncline.lab.replay.clock import BLOCKED_NS, CATCH_UP_NS, DeviceClock
from tests.lab.replay.fake import FakeTime

MS = 1_000_000


def test_operations_follow_one_another_without_a_gap() -> None:
    fake = FakeTime()
    clock = fake.clock()
    ends = [clock.run(5 * MS), clock.run(3 * MS)]
    assert ends == [1_000 + 5 * MS, 1_000 + 8 * MS]
    assert fake.now_ns == 1_000  # the host has not waited
    clock.wait()
    assert fake.now_ns == ends[-1]


def test_lanes_run_beside_one_another_and_wait_for_one_another() -> None:
    fake = FakeTime()
    clock = fake.clock()
    launched = clock.run(2 * MS, lane="host")
    assert clock.run(3 * MS, not_before_ns=launched) == 1_000 + 5 * MS
    assert clock.run(1 * MS, lane="host") == 1_000 + 3 * MS


def test_waking_late_is_caught_up() -> None:
    late = itertools.cycle([0, 4 * MS, 1 * MS])
    fake = FakeTime(lambda: next(late))
    clock = fake.clock()
    for _ in range(300):
        clock.run(5 * MS)
        clock.wait()
        clock.arrived()
    assert 1_000 + 1500 * MS <= fake.now_ns <= 1_000 + 1504 * MS
    assert clock.idle_ns == 0


def test_the_device_stands_still_until_what_it_waits_for_has_arrived() -> None:
    fake = FakeTime()
    clock = fake.clock()
    clock.run(5 * MS)
    clock.wait()
    fake.block_until(1_000 + 25 * MS)
    clock.arrived()
    assert clock.run(5 * MS) == 1_000 + 30 * MS
    assert clock.idle_ns == 20 * MS


def test_what_arrives_while_the_device_is_busy_holds_nothing_up() -> None:
    fake = FakeTime()
    clock = fake.clock()
    clock.run(50 * MS)
    fake.block_until(1_000 + 25 * MS)
    clock.arrived()
    assert clock.run(5 * MS) == 1_000 + 55 * MS
    assert clock.idle_ns == 0


@pytest.mark.parametrize("lost_ns", [BLOCKED_NS // 2, 8 * MS])
def test_a_hook_and_a_lost_core_hold_nothing_up(lost_ns: int) -> None:
    fake = FakeTime()
    clock = fake.clock()
    clock.run(5 * MS)
    clock.wait()
    fake.lose_core(lost_ns)
    clock.arrived()
    assert clock.run(5 * MS) == 1_000 + 10 * MS
    fake.block_until(fake.now_ns + BLOCKED_NS // 2)  # so short a wait is a lock's
    clock.arrived()
    assert clock.idle_ns == 0


def test_a_host_that_is_far_behind_holds_the_device_up() -> None:
    fake = FakeTime()
    clock = fake.clock()
    clock.run(5 * MS)
    clock.wait()
    fake.lose_core(CATCH_UP_NS + 30 * MS)
    assert clock.run(5 * MS) == 1_000 + 40 * MS


def test_time_that_really_passes() -> None:
    clock = DeviceClock()
    before_ns = time.monotonic_ns()
    end_ns = clock.run(20 * MS)
    clock.wait()
    assert time.monotonic_ns() >= end_ns >= before_ns
