"""DeAR: buckets from the input on, and both collectives by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.planners.dear import Dear
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from tests import strategies as some
from tests.plan.planners.instances import chain, chains

A_SECOND_AN_ELEMENT = Network.line(workers=2, a_s=0, b_s_per_byte=1 / 4)


def test_a_small_chain_by_hand() -> None:
    profile = chain(backward_s=[1, 1, 1], elements=[4, 2, 2], forward_s=[2, 1, 1])
    plan = Dear(bucket_bytes=0).plan(profile, A_SECOND_AN_ELEMENT)
    assert [(m.start, m.stop, m.collective) for m in plan.messages] == [
        (0, 4, "reduce-scatter"),
        (4, 6, "reduce-scatter"),
        (6, 8, "reduce-scatter"),
        (6, 8, "all-gather"),
        (4, 6, "all-gather"),
        (0, 4, "all-gather"),
    ]
    assert (plan.wait, plan.in_flight) == ("need", 1)
    # Scattered 1-3, 3-4, 4-5; gathered 5-6, 6-7, 7-9. The first layer runs from 6 to 8, the second
    # to 9, the third to 10, and then the backward pass begins again.
    prediction = predict(profile, A_SECOND_AN_ELEMENT, plan).prediction
    assert prediction.iteration_s == 10
    assert prediction.communication_s == 8


@pytest.mark.parametrize(
    ("bucket_bytes", "stops"),
    [(0, [1, 3, 6, 7]), (13, [3, 6, 7]), (17, [3, 7]), (100, [7]), (28, [1, 7]), (29, [7])],
)
def test_buckets_fill_from_the_input_and_stay_below_their_size(
    bucket_bytes: int, stops: list[int]
) -> None:
    # In forward order 4, 12, 8 and 4 bytes.
    profile = chain(backward_s=[1] * 4, elements=[1, 2, 3, 1], forward_s=[1] * 4)
    plan = Dear(bucket_bytes=bucket_bytes).plan(profile, A_SECOND_AN_ELEMENT)
    assert [m.stop for m in plan.messages if m.collective == "reduce-scatter"] == stops


@some.many
@given(chains(), some.integer_curves(), st.integers(0, 9000))
def test_all_is_scattered_before_anything_is_gathered(
    profile: Profile, curve: some.IntegerCurve, bucket_bytes: int
) -> None:
    plan = Dear(bucket_bytes=bucket_bytes).plan(profile, curve.network(2))
    half = len(plan.messages) // 2
    scattered, gathered = plan.messages[:half], plan.messages[half:]
    assert {m.collective for m in scattered} == {"reduce-scatter"}
    assert [m.start for m in scattered] == sorted(m.start for m in scattered)
    assert [(m.start, m.stop) for m in gathered] == [(m.start, m.stop) for m in scattered[::-1]]
    base_s = profile.computation_s
    assert predict(profile, curve.network(2), plan).prediction.iteration_s >= base_s * (1 - 1e-9)


def test_settings() -> None:
    assert Dear().bucket_bytes == 25 * 1024 * 1024
    with pytest.raises(UserError, match="dear: bucket_bytes must be at least 0, found -1"):
        Dear(bucket_bytes=-1)
