"""Profiles: sums and ready times (what is refused stands in test_document)."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given

from syncline.errors import UserError
from syncline.model.profile import Gradient, Operation, Profile
from tests import strategies as some
from tests.model.test_document import PROFILE


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
    clock = [0.0, *itertools.accumulate(o.duration_s for o in profile.operations)]
    assert profile.ready_s() == tuple(clock[g.ready_after + 1] for g in profile.gradients)
    assert list(profile.ready_s()) == sorted(profile.ready_s())


def test_a_gradient_after_the_update_can_never_be_exchanged() -> None:
    """The update waits for every message: the simulator would never end."""
    operations = tuple(msgspec.structs.replace(o, after=()) for o in PROFILE.operations)
    with pytest.raises(
        UserError, match=r"'w2' is ready after operations\[1\], but operations\[0\]"
    ):
        msgspec.structs.replace(PROFILE, operations=(operations[3], *operations[:3]))


def test_a_profile_longer_than_any_iteration() -> None:
    with pytest.raises(UserError, match=r"all operations together is 9.6e[+]04 s, longer than"):
        Profile(
            model="m",
            device="cpu",
            workers=1,
            iterations=1,
            operations=tuple(
                Operation(name=n, phase="backward", duration_s=48_000) for n in ("a", "b")
            ),
            gradients=(Gradient(name="g", elements=1, ready_after=0),),
        )
