"""P3: slices of fixed size by need."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.plan import Message
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.slices import MOST_SLICES
from syncline.plan.planners.tictac import TicTac
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from tests import strategies as some
from tests.plan.planners.instances import chain, chains, iteration_s, period_ns
from tests.plan.planners.test_tictac import A_SECOND_AN_ELEMENT, FIGURE_2


def test_figure_2_of_pace() -> None:
    # With slices of an element and no latency P3 comes to the preemptive optimum, 9.
    plan = P3(slice_elements=1).plan(FIGURE_2, A_SECOND_AN_ELEMENT)
    assert [m.start for m in plan.messages] == [0, 4, 6, 5, 1, 2, 3]
    assert plan.wait == "need"
    assert predict(FIGURE_2, A_SECOND_AN_ELEMENT, plan).prediction.iteration_s == 9
    assert iteration_s(FIGURE_2, A_SECOND_AN_ELEMENT, TicTac()) == 10
    assert iteration_s(FIGURE_2, A_SECOND_AN_ELEMENT, Wfbp()) == 12


def test_every_slice_pays_the_latency() -> None:
    network = Network.line(workers=2, a_s=1, b_s_per_byte=1 / 4)
    assert iteration_s(FIGURE_2, network, P3(slice_elements=1)) > iteration_s(
        FIGURE_2, network, TicTac()
    )


@some.many
@given(chains(), some.integer_curves(), st.integers(1, 400))
def test_slices_cover_and_the_simulator_agrees(
    profile: Profile, curve: some.IntegerCurve, size: int
) -> None:
    plan = P3(slice_elements=size).plan(profile, curve.network(2))
    found = sorted((m.start, m.stop) for m in plan.messages)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(0 < stop - start <= size for start, stop in found)
    ends = set(itertools.accumulate(g.elements for g in profile.gradients))
    assert ends <= {stop for _, stop in found}  # no slice is of two tensors
    # A slice is smaller than the others only where its tensor ends.
    assert all(stop - start == size or stop in ends for start, stop in found)
    predicted = predict(profile, curve.network(2), plan).prediction.iteration_s
    assert round(predicted * 1e9) == period_ns(profile, plan, curve.cost_ns)


def test_sizes_of_several_dtypes_are_in_bytes() -> None:
    profile = chain(
        backward_s=[1, 0], elements=[4, 4], forward_s=[1, 1], dtypes=["float64", "float16"]
    )
    plan = P3(slice_elements=3).plan(profile, A_SECOND_AN_ELEMENT)
    bytes_of = dict(zip(plan.messages, plan.message_bytes(), strict=True))
    assert bytes_of[Message(start=0, stop=3)] == 24
    assert bytes_of[Message(start=4, stop=7)] == 6


def test_the_default_is_mxnets() -> None:
    profile = chain(backward_s=[1], elements=[100_000], forward_s=[1])
    plan = P3().plan(profile, A_SECOND_AN_ELEMENT)
    assert [m.stop - m.start for m in plan.messages] == [40_000, 40_000, 20_000]


def test_settings() -> None:
    with pytest.raises(UserError, match="p3: slice_elements must be at least 1, found 0"):
        P3(slice_elements=0)


def test_too_many_slices() -> None:
    profile = chain(backward_s=[1], elements=[MOST_SLICES * 10], forward_s=[1])
    assert P3(slice_elements=10).plan(profile, A_SECOND_AN_ELEMENT).messages
    said = (
        r"p3: slices of 9 elements .* into 145636 messages, at most 131072 .* at least 20 elements"
    )
    with pytest.raises(UserError, match=said):
        P3(slice_elements=9).plan(profile, A_SECOND_AN_ELEMENT)
