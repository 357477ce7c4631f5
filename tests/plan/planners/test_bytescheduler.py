"""ByteScheduler: partitions, and the credit in messages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.planners.bytescheduler import ByteScheduler
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from tests import strategies as some
from tests.plan.planners.instances import chain, chains, iteration_s
from tests.plan.planners.test_tictac import A_SECOND_AN_ELEMENT, FIGURE_2


@pytest.mark.parametrize(
    ("partition", "credit", "in_flight"),
    [(8_000_000, 16_000_000, 2), (1_000_000, 4_000_000, 4), (3, 4, 2), (5, 4, 1), (1, 64, 64)],
)
def test_a_credit_lasts_for_whole_partitions(partition: int, credit: int, in_flight: int) -> None:
    planner = ByteScheduler(partition_elements=partition, credit_elements=credit)
    assert planner.in_flight == in_flight
    assert planner.plan(FIGURE_2, A_SECOND_AN_ELEMENT).in_flight == in_flight


def test_a_credit_of_one_partition_is_p3() -> None:
    planner = ByteScheduler(partition_elements=1, credit_elements=1)
    found = planner.plan(FIGURE_2, A_SECOND_AN_ELEMENT)
    assert found.messages == P3(slice_elements=1).plan(FIGURE_2, A_SECOND_AN_ELEMENT).messages


def test_what_was_handed_over_is_not_called_back() -> None:
    # At 1 two slices of AR_1 leave. Each arrival lets another go: at 2 one of AR_2, ready then.
    planner = ByteScheduler(partition_elements=1, credit_elements=2)
    plan = planner.plan(FIGURE_2, A_SECOND_AN_ELEMENT)
    assert [m.start for m in plan.messages] == [0, 1, 4, 6, 5, 2, 3]
    # AR_3, ready at 3, is the fourth and arrives at 5, a second later than by itself. AR_2 arrives
    # at 6 and AR_1 at 8: the layers run from 5 to 7, 7 to 8 and 8 to 9.
    assert predict(FIGURE_2, A_SECOND_AN_ELEMENT, plan).prediction.iteration_s == 9


def test_a_credit_hides_latencies() -> None:
    # Four messages of 1 s latency and 1 s transmission, all ready at 1: with two in flight the
    # second's latency overlaps the first's transmission, from then on every second.
    profile = chain(backward_s=[1], elements=[4], forward_s=[0])
    network = Network.line(workers=2, a_s=1, b_s_per_byte=1 / 4)
    one = ByteScheduler(partition_elements=1, credit_elements=1)
    two = ByteScheduler(partition_elements=1, credit_elements=2)
    assert iteration_s(profile, network, one) == 1 + 4 * 2
    # Latencies at 1, 1, 3, 4; transmissions 2-3, 3-4, 4-5, 5-6.
    assert iteration_s(profile, network, two) == 6


def test_better_than_ready_order() -> None:
    planner = ByteScheduler(partition_elements=1, credit_elements=2)
    assert iteration_s(FIGURE_2, A_SECOND_AN_ELEMENT, planner) == 9
    assert iteration_s(FIGURE_2, A_SECOND_AN_ELEMENT, Wfbp()) == 12


@some.many
@given(chains(), some.integer_curves(), st.integers(1, 400), st.integers(1, 3))
def test_partitions_cover_every_tensor(
    profile: Profile, curve: some.IntegerCurve, size: int, partitions: int
) -> None:
    planner = ByteScheduler(partition_elements=size, credit_elements=partitions * size)
    plan = planner.plan(profile, curve.network(2))
    assert (plan.wait, plan.in_flight) == ("need", partitions)
    found = sorted((m.start, m.stop) for m in plan.messages)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert max(stop - start for start, stop in found) <= size
    base_s = profile.computation_s
    assert predict(profile, curve.network(2), plan).prediction.iteration_s >= base_s * (1 - 1e-9)


def test_settings() -> None:
    with pytest.raises(UserError, match="partition_elements must be at least 1, found 0"):
        ByteScheduler(partition_elements=0)
    with pytest.raises(UserError, match="credit_elements must be at least 1, found -1"):
        ByteScheduler(credit_elements=-1)
    with pytest.raises(UserError, match="lasts for 65 partitions of 2; at most 64 messages"):
        ByteScheduler(partition_elements=2, credit_elements=129)
