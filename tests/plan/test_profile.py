"""Profiles: sums and ready times (what is refused stands in test_document)."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given

from syncline.errors import UserError
from syncline.plan.profile import Profile
from tests import strategies as some
from tests.plan.documents import PROFILE
from tests.plan.simulator.chains import gradient, job, op


def test_sums_by_hand() -> None:
    assert PROFILE.computation_s == 1.125
    assert PROFILE.phase_s("forward") == 0.5
    assert PROFILE.phase_s("backward", "update") == 0.625
    assert PROFILE.phase_s("data") == 0
    assert PROFILE.gradient_bytes == 10 * 4 + 30 * 2
    assert PROFILE.ready_s() == (0.75, 1.0)


@some.few
@given(some.profiles())
def test_ready_times_follow_the_operations(profile: Profile) -> None:
    """One operation at a time where there is one lane, each duration rounded by itself."""
    computing = msgspec.structs.replace(
        profile,
        operations=tuple(
            msgspec.structs.replace(o, phase="forward" if o.phase in ("data", "copy") else o.phase)
            for o in profile.operations
        ),
    )
    clock = [*itertools.accumulate(round(o.duration_s * 1e9) for o in profile.operations)]
    ready = [clock[g.ready_after] for g in profile.gradients]
    assert computing.ready_ns() == ready
    assert computing.ready_s() == tuple(ns / 1e9 for ns in ready)
    assert computing.computation_s == clock[-1] / 1e9
    assert all(a <= b for a, b in zip(profile.ready_ns(), ready, strict=True))


def test_lanes_run_beside_each_other_once_the_batch_is_there() -> None:
    operations = [
        op("data", 5),
        op("copy", 2, 0),
        op("forward", 3, resource="host"),  # launches the next
        op("forward", 10, 2),
        op("backward", 4, 2, resource="host"),
        op("backward", 1, 4),
        op("update", 1, 5),
    ]
    profile = job(operations, gradient(3, 5, 3, "a"), gradient(1, 5, name="b"))
    assert profile.finish_ns() == [5, 7, 8, 18, 12, 19, 20]
    assert profile.ready_ns() == [19, 19]
    assert profile.computation_s == 20e-9
    assert profile.need_operations() == [3, 4]
    assert profile.deferred_updates_ns() == {3: 1, 4: 0}


def test_a_gradient_after_the_update_can_never_be_exchanged() -> None:
    """The update waits for every message: the simulator would never end."""
    operations = tuple(msgspec.structs.replace(o, after=()) for o in PROFILE.operations)
    with pytest.raises(UserError, match=r"'w2' is ready after operations\[1\], but operations"):
        msgspec.structs.replace(PROFILE, operations=(operations[3], *operations[:3]))


def test_a_profile_longer_than_any_iteration() -> None:
    operations = (msgspec.structs.replace(o, duration_s=24_000) for o in PROFILE.operations)
    with pytest.raises(UserError, match=r"all operations together is 9.6e[+]04 s, longer than"):
        msgspec.structs.replace(PROFILE, operations=tuple(operations))
