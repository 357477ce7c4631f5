"""Horovod: ticks and fusion by hand, and against a loop over cycles."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.plan import Message
from syncline.plan.planners.horovod import Horovod
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from tests import strategies as some
from tests.plan.planners.instances import chain

A_SECOND_AN_ELEMENT = Network.line(workers=2, a_s=0, b_s_per_byte=1 / 4)


def test_ticks_by_hand() -> None:
    # Ready at 3, 4, 5 and 9.5 s; with cycles of 2 s handed over at 4, 4, 6 and 10.
    profile = chain(backward_s=[1, 1, 1, 4.5], elements=[1, 2, 1, 1], forward_s=[2, 0, 0, 0])
    plan = Horovod(cycle_s=2).plan(profile, A_SECOND_AN_ELEMENT)
    assert plan.messages == (
        Message(start=0, stop=3, delay_s=0),
        Message(start=3, stop=4, delay_s=1),
        Message(start=4, stop=5, delay_s=0.5),
    )
    assert (plan.wait, plan.in_flight) == ("update", 1)
    # Sent from 4 to 7, from 7 to 8 and from 10 to 11.
    timeline = predict(profile, A_SECOND_AN_ELEMENT, plan).timeline
    sent = [(s.start_ns / 1e9, s.stop_ns / 1e9) for s in timeline.spans if s.kind == "message"]
    assert [times for times in sent if times[1] > times[0]] == [(4, 7), (7, 8), (10, 11)]
    assert timeline.iteration_ns == 11_000_000_000


@pytest.mark.parametrize(
    ("threshold_bytes", "stops"), [(0, [1, 3, 4]), (11, [1, 3, 4]), (12, [3, 4]), (16, [4])]
)
def test_the_threshold(threshold_bytes: int, stops: list[int]) -> None:
    profile = chain(backward_s=[1, 0, 0], elements=[1, 2, 1], forward_s=[0, 0, 0])
    plan = Horovod(threshold_bytes=threshold_bytes).plan(profile, A_SECOND_AN_ELEMENT)
    assert [m.stop for m in plan.messages] == stops


def test_dtypes_are_not_fused() -> None:
    profile = chain(
        backward_s=[1, 0, 0, 0],
        elements=[1, 2, 1, 1],
        forward_s=[0, 0, 0, 0],
        dtypes=["float32", "float32", "bfloat16", "float32"],
    )
    plan = Horovod().plan(profile, A_SECOND_AN_ELEMENT)
    assert [m.stop for m in plan.messages] == [3, 4, 5]


def test_without_a_cycle_what_is_ready_at_once_is_fused() -> None:
    profile = chain(backward_s=[1, 0, 1], elements=[1, 2, 1], forward_s=[0, 0, 0])
    plan = Horovod(cycle_s=0).plan(profile, A_SECOND_AN_ELEMENT)
    assert [(m.stop, m.delay_s) for m in plan.messages] == [(3, 0), (4, 0)]


@some.many
@given(some.layer_profiles(), st.integers(1, 3000), st.integers(0, 9000))
def test_cycle_by_cycle(profile: Profile, cycle_ns: int, threshold_bytes: int) -> None:
    network = Network.line(workers=4, a_s=1e-6, b_s_per_byte=1e-9)
    planner = Horovod(cycle_s=cycle_ns / 1e9, threshold_bytes=threshold_bytes)
    plan = planner.plan(profile, network)
    found = [(m.start, m.stop, round(m.delay_s * 1e9)) for m in plan.messages]

    # Tensors without elements hold up the one before them.
    pending: list[tuple[int, int]] = []  # (ready, elements)
    for gradient, ready in zip(profile.gradients, profile.ready_ns(), strict=True):
        if pending and (gradient.elements == 0 or pending[-1][1] == 0):
            pending[-1] = (ready, pending[-1][1] + gradient.elements)
        else:
            pending.append((ready, gradient.elements))
    expected = []
    start = 0
    for tick, group in itertools.groupby(pending, key=lambda p: math.ceil(p[0] / cycle_ns)):
        waiting = list(group)
        while waiting:  # FuseResponses
            ready, held = waiting.pop(0)
            while waiting and 4 * (held + waiting[0][1]) <= threshold_bytes:
                ready, more = waiting.pop(0)
                held += more
            expected.append((start, start + held, tick * cycle_ns - ready))
            start += held
    assert found == expected


def test_settings() -> None:
    assert (Horovod().cycle_s, Horovod().threshold_bytes) == (1e-3, 128 * 1024 * 1024)
    with pytest.raises(UserError, match="horovod: cycle_s must be a finite time"):
        Horovod(cycle_s=-1)
    with pytest.raises(UserError, match="must be 0 or at least a nanosecond, found 1e-10"):
        Horovod(cycle_s=1e-10)
    with pytest.raises(UserError, match="threshold_bytes must be at least 0, found -1"):
        Horovod(threshold_bytes=-1)
