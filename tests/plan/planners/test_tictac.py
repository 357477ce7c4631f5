"""TicTac: whole tensors by need, and what order alone is worth."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given

from syncline.plan.network import PRESETS, Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners.bytescheduler import ByteScheduler
from syncline.plan.planners.pace import Pace
from syncline.plan.planners.slices import whole_tensors
from syncline.plan.planners.tictac import TicTac
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from tests import strategies as some
from tests.plan.planners.instances import chain, chains, iteration_s, period_ns
from tests.trace_files import PIPEDREAM, TRACES, read_pipedream

# PACE, Fig. 2, with 1 s an element: AR_1 is long and ready first, AR_3 is needed first.
FIGURE_2 = chain(backward_s=[1, 1, 1], elements=[4, 2, 1], forward_s=[2, 1, 1])
A_SECOND_AN_ELEMENT = Network.line(workers=2, a_s=0, b_s_per_byte=1 / 4)


def test_figure_2_of_pace() -> None:
    plan = TicTac().plan(FIGURE_2, A_SECOND_AN_ELEMENT)
    # AR_1 from 1 to 5; then AR_3, ready since 3, goes before AR_2, ready since 2.
    assert [(m.start, m.stop) for m in plan.messages] == [(0, 4), (6, 7), (4, 6)]
    assert (plan.wait, plan.in_flight) == ("need", 1)
    # f1 needs AR_3 at 6 and runs to 8; f2 needs AR_2 at 8 and runs to 9; f3 to 10.
    prediction = predict(FIGURE_2, A_SECOND_AN_ELEMENT, plan).prediction
    assert prediction.iteration_s == 10


@some.many
@given(chains(), some.integer_curves())
def test_every_tensor_once_and_the_simulator_agrees(
    profile: Profile, curve: some.IntegerCurve
) -> None:
    plan = TicTac().plan(profile, curve.network(2))
    ends = list(itertools.accumulate((g.elements for g in profile.gradients), initial=0))
    assert sorted((m.start, m.stop) for m in plan.messages) == list(itertools.pairwise(ends))
    found = predict(profile, curve.network(2), plan).prediction.iteration_s
    assert round(found * 1e9) == period_ns(profile, plan, curve.cost_ns)


@some.few
@given(chains())
def test_without_a_network_nothing_is_waited_for(profile: Profile) -> None:
    free = Network.line(workers=2, a_s=0, b_s_per_byte=0)
    found = iteration_s(profile, free, TicTac())
    assert round(found * 1e9) == round(profile.computation_s * 1e9)


def test_waiting_on_need_gains_nothing_without_the_order() -> None:
    # In ready order the first layer's gradient is the last to arrive, whoever waits for it.
    wfbp = Wfbp().plan(FIGURE_2, A_SECOND_AN_ELEMENT)
    assert predict(FIGURE_2, A_SECOND_AN_ELEMENT, wfbp).prediction.iteration_s == 12
    fifo = Plan(
        planner="fifo",
        model=wfbp.model,
        workers=wfbp.workers,
        tensors=wfbp.tensors,
        messages=wfbp.messages,
        wait="need",
    )
    assert predict(FIGURE_2, A_SECOND_AN_ELEMENT, fifo).prediction.iteration_s == 12
    assert iteration_s(FIGURE_2, A_SECOND_AN_ELEMENT, TicTac()) == 10


@some.many
@given(chains(), some.integer_curves())
def test_never_worse_than_ready_order(profile: Profile, curve: some.IntegerCurve) -> None:
    # Neither leaves the channel idle while something is ready, so the last arrival is the same; and
    # after it TicTac has at most the whole forward pass to go, as wfbp always has.
    network = curve.network(2)
    assert iteration_s(profile, network, TicTac()) <= iteration_s(profile, network, Wfbp())


@pytest.mark.parametrize("network", ["10gbe-k80", "10gbe-v100", "56gbib-v100"])
@pytest.mark.parametrize("trace", PIPEDREAM)
def test_measured_forward_passes_hide_what_ready_order_exposes(trace: str, network: str) -> None:
    if not TRACES.is_dir():
        pytest.skip(f"no traces: {TRACES} is absent")
    profile = read_pipedream(TRACES / "pipedream" / f"{trace}.graph.txt")
    exposed = {
        planner.NAME: predict(
            profile, PRESETS[network], planner.plan(profile, PRESETS[network])
        ).prediction.exposed_s
        for planner in (Wfbp(), TicTac(), ByteScheduler(), Pace())
    }
    assert exposed["wfbp"] > 0
    assert exposed["tictac"] < exposed["wfbp"]
    assert exposed["bytescheduler"] < exposed["wfbp"]
    assert exposed["pace"] < exposed["wfbp"]


def test_a_tensor_without_elements_goes_with_the_one_before() -> None:
    profile = chain(backward_s=[1, 1, 1, 1], elements=[0, 3, 0, 2], forward_s=[1, 1, 1, 1])
    slices = whole_tensors(profile)
    assert [(s.start, s.stop, s.ready_ns, s.need) for s in slices] == [
        (0, 3, 3_000_000_000, 1),
        (3, 5, 4_000_000_000, 0),
    ]
    plan = TicTac().plan(profile, A_SECOND_AN_ELEMENT)
    assert plan.messages == (Message(start=0, stop=3), Message(start=3, stop=5))


def test_where_no_need_is_known_the_input_comes_first() -> None:
    profile = some.profile_of([5, 5, 5], [1, 1, 1])  # every gradient is needed by the next backward
    network = Network.line(workers=4, a_s=1e-3, b_s_per_byte=0)
    plan = TicTac().plan(profile, network)
    assert [m.start for m in plan.messages] == [0, 2, 1]
