"""What computing and messages do to each other, fitted to iterations under known factors."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from syncline.plan.cost import CostCurve
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.decoupled import in_equal_parts
from syncline.plan.planners.table import CANDIDATES
from syncline.plan.profile import WAIT, Operation, Profile
from syncline.plan.simulator.contention import (
    LARGEST,
    Measured,
    corrected_by_baseline,
    fit_contention,
)
from syncline.plan.simulator.predict import predict, predict_iteration_s
from syncline.plan.simulator.transformations import with_compute_scale as slowed
from tests import strategies as some

NETWORK = Network.line(workers=4, a_s=2e-4, b_s_per_byte=2e-9)
SLOW = Network.line(workers=4, a_s=2e-4, b_s_per_byte=6e-9)
"""On it messages last beyond the backward pass, however slow that is."""
DDP = Ddp(bucket_bytes=1 << 20, first_bucket_bytes=1 << 18)


def instance(seed: int = 5) -> tuple[Profile, list[Plan]]:
    """Return a profile of 20 layers, some 40 ms, and plans: DDP's first."""
    random_ = random.Random(seed)
    profile = some.profile_of(
        [random_.randint(500_000, 2_000_000) for _ in range(20)],
        [random_.randint(1000, 500_000) for _ in range(20)],
        forward_ns=10_000_000,
    )
    return profile, [planner.plan(profile, NETWORK) for planner in (DDP, *CANDIDATES)]


def under(contention: Contention, network: Network = NETWORK) -> Network:
    return msgspec.structs.replace(network, contention=contention)


def measured(profile: Profile, network: Network, plan: Plan) -> Measured:
    """Return what a training under ``plan`` would measure."""
    spans = predict(profile, network, plan).timeline.spans
    computing_ns = sum(s.stop_ns - s.start_ns for s in spans if s.kind in ("forward", "backward"))
    slower_s = max(computing_ns / 1e9 - profile.phase_s("forward", "backward"), 0.0)
    return Measured(plan, predict_iteration_s(profile, network, plan), slowdown_s=slower_s)


def waiting(profile: Profile, duration_s: float) -> Profile:
    """Return the profile with a wait for the slowest worker."""
    wait = Operation(name=WAIT, phase="finalize", duration_s=duration_s)
    return msgspec.structs.replace(profile, operations=(*profile.operations, wait))


@some.few
@given(st.integers(0, 100), st.floats(1, 2.5), st.floats(1, 2.5))
def test_known_factors_are_found_in_the_baseline_alone(
    seed: int, computing: float, exchange: float
) -> None:
    profile, (ddp, *_) = instance(seed)
    truth = under(Contention(computing=computing, exchange=exchange), SLOW)
    stock = measured(profile, truth, ddp)
    found = fit_contention(profile, under(Contention(computing=9.0, exchange=9.0), SLOW), [stock])
    assert found.contention.computing == pytest.approx(computing, abs=2e-2)
    assert found.contention.exchange == pytest.approx(exchange, abs=3e-2)
    assert found.contention.fitted
    assert under(Contention(), found) == SLOW
    assert predict_iteration_s(profile, found, ddp) == pytest.approx(stock.iteration_s, rel=2e-3)


@some.few
@given(st.integers(0, 100), st.floats(1, 2.5), st.floats(1, 2.5))
@example(84, 2.375, 1.546875)
def test_the_baseline_is_predicted_where_several_factors_explain_it(
    seed: int, computing: float, exchange: float
) -> None:
    """Hidden messages do not show how slow they are."""
    profile, (ddp, *_) = instance(seed)
    truth = under(Contention(computing=computing, exchange=exchange))
    stock = measured(profile, truth, ddp)
    found = fit_contention(profile, NETWORK, [stock])
    assert predict_iteration_s(profile, found, ddp) == pytest.approx(stock.iteration_s, rel=0.02)
    # One factor may stand in for a little of the other.
    missing = min(max(computing - found.contention.computing, 0.0), 0.07)
    assert found.contention.exchange <= exchange + 0.03 + missing


@some.few
@given(st.integers(0, 100), st.floats(0.5, 10), st.none() | st.floats(0, 0.05))
def test_factors_stay_in_range_and_the_baseline_is_met_where_they_can(
    seed: int, slower: float, slowdown_s: float | None
) -> None:
    profile, (ddp, *_) = instance(seed)
    least_s = predict_iteration_s(profile, NETWORK, ddp)
    found = fit_contention(profile, NETWORK, [Measured(ddp, slower * least_s, 0.0, slowdown_s)])
    assert 1 <= found.contention.computing <= LARGEST
    assert 1 <= found.contention.exchange <= LARGEST
    share = predict_iteration_s(profile, found, ddp) / (slower * least_s)
    if found.contention.exchange == 1:
        assert share >= 0.999
    elif found.contention.exchange == LARGEST:
        assert share <= 1.001
    else:
        assert share == pytest.approx(1, rel=2e-3)


@pytest.mark.parametrize("known", [1.0, 1.37, 3.5])
def test_without_timed_passes_both_factors_are_the_same(known: float) -> None:
    profile, (ddp, *_) = instance()
    stock_s = predict_iteration_s(profile, under(Contention(computing=known, exchange=known)), ddp)
    found = fit_contention(profile, NETWORK, [Measured(ddp, stock_s)]).contention
    assert found.computing == found.exchange == pytest.approx(known, abs=2e-3)


@pytest.mark.parametrize("seed", range(3))
def test_noise_averages_out_over_several_plans(seed: int) -> None:
    profile, plans = instance(seed)
    random_ = random.Random(seed)
    truth = under(Contention(computing=1.05, exchange=1.6))
    stock = measured(profile, truth, plans[0])
    tried = [
        Measured(plan, predict_iteration_s(profile, truth, plan) * random_.uniform(0.99, 1.01))
        for plan in plans[1:]
    ]
    found = fit_contention(profile, NETWORK, [stock, *tried]).contention
    assert found.computing == pytest.approx(1.05, abs=0.01)
    assert found.exchange == pytest.approx(1.6, abs=0.1)


@some.few
@given(st.integers(0, 100), st.floats(1, 2), st.floats(1, 1.5), st.floats(0, 2e-3))
def test_few_messages_and_many_tell_what_each_takes_from_computing(
    seed: int, computing: float, exchange: float, per_message_s: float
) -> None:
    profile, (ddp, *_) = instance(seed)
    truth = Contention(computing=computing, exchange=exchange, per_message_s=per_message_s)
    plans = [ddp, *(in_equal_parts(profile, SLOW, parts) for parts in (4, 12))]
    runs = [measured(profile, under(truth, SLOW), plan) for plan in plans]
    found = fit_contention(profile, SLOW, runs)
    assert found.contention_by_need is not None
    assert found.contention_by_need.per_message_s == pytest.approx(per_message_s, abs=1e-4)
    for run in runs:
        assert predict_iteration_s(profile, found, run.plan) == pytest.approx(
            run.iteration_s, rel=0.01
        )


@some.few
@given(st.integers(0, 100), st.floats(0, 2e-3))
def test_a_plan_of_many_messages_tells_what_each_takes_under_the_reducer(
    seed: int, per_message_s: float
) -> None:
    profile, _ = instance(seed)
    stock, many, others = (
        in_equal_parts(profile, SLOW, parts, by_need=False) for parts in (2, 12, 7)
    )
    handling = Contention(per_message_s=per_message_s, free_messages=len(stock.messages))
    truth = under(handling, SLOW)
    runs = [measured(profile, truth, plan) for plan in (stock, many)]
    found = fit_contention(profile, SLOW, runs)
    assert found.contention.free_messages == len(stock.messages)
    for plan, error in ((stock, 2e-3), (many, 0.03), (others, 0.03)):
        assert predict_iteration_s(profile, found, plan) == pytest.approx(
            predict_iteration_s(profile, truth, plan), rel=error
        )


def test_what_the_reducer_and_the_engine_send_is_fitted_apart() -> None:
    profile, (ddp, *_) = instance()
    of_reducer, of_engine = Contention(exchange=2.0), Contention(computing=1.5)
    truth = msgspec.structs.replace(under(of_reducer), contention_by_need=of_engine)
    plan = in_equal_parts(profile, NETWORK, 6)
    found = fit_contention(profile, NETWORK, [measured(profile, truth, p) for p in (ddp, plan)])
    assert found.contention_by_need is not None
    for fitted, known in ((found.contention, of_reducer), (found.contention_by_need, of_engine)):
        assert fitted.computing == pytest.approx(known.computing, abs=0.02)
        assert fitted.exchange == pytest.approx(known.exchange, abs=0.02)
    only_stock = fit_contention(profile, truth, [measured(profile, truth, ddp)])
    assert only_stock.contention_by_need == of_engine


@some.few
@given(st.integers(0, 100), st.floats(-0.99, 0.99))
def test_noise_is_no_contention(seed: int, share: float) -> None:
    profile, (ddp, *_) = instance(seed)
    alone_s = predict_iteration_s(profile, NETWORK, ddp)
    noise_s = 0.03 * alone_s
    stock = Measured(ddp, alone_s + share * noise_s, noise_s, slowdown_s=0.0)
    assert fit_contention(profile, NETWORK, [stock]).contention == Contention(fitted=True)


def test_what_is_hidden_says_nothing_about_messages() -> None:
    """Messages of 1 us beside operations of milliseconds: any factor would do, so none is taken."""
    profile, (ddp, *_) = instance()
    fast = Network.line(workers=4, a_s=1e-6, b_s_per_byte=0.0)
    iteration_s = predict_iteration_s(profile, fast, ddp)
    found = fit_contention(profile, fast, [Measured(ddp, iteration_s, 0.0, 0.0)])
    assert found.contention == Contention(fitted=True)


def test_nothing_measured_changes_nothing() -> None:
    profile, _ = instance()
    guessed = under(Contention(computing=1.25, exchange=1.25))
    assert fit_contention(profile, guessed, []) == guessed


def test_a_guess_that_the_baseline_cannot_refute_is_kept() -> None:
    guessed = under(Contention(computing=1.25, exchange=1.25))
    profile, (ddp, *_) = instance()
    single = PLANNERS["single"].plan(profile, NETWORK)  # nothing runs beside its message
    for plan, noise, kept in ((single, 0.0, True), (ddp, 1.0, True), (ddp, 0.0, False)):
        free_s = predict_iteration_s(profile, NETWORK, plan)
        stock = Measured(plan, free_s, noise * free_s, slowdown_s=0.0)
        found = fit_contention(profile, guessed, [stock]).contention
        assert found == (guessed.contention if kept else Contention(fitted=True))


@some.few
@given(
    st.integers(0, 100),
    st.floats(1, 1.5),
    st.floats(0, 0.02),
    st.floats(1, 2),
    st.sampled_from([0.0, 0.0, 0.05]),
)
def test_a_disturbed_profile_still_predicts_the_baseline(
    seed: int, slower: float, waits_s: float, exchange: float, waited_s: float
) -> None:
    profile, (ddp, *_) = instance(seed)
    truth = under(Contention(exchange=exchange))
    stock = measured(profile, truth, ddp)
    stock = stock._replace(iteration_s=stock.iteration_s + waited_s)
    disturbed = waiting(slowed(profile, slower), waits_s)
    computing_s = profile.phase_s("forward", "backward")
    stock = stock._replace(slowdown_s=computing_s * (1 - slower))
    found, same, stock = corrected_by_baseline(stock, disturbed, NETWORK)
    assert same == NETWORK
    assert found.phase_s("forward", "backward") == pytest.approx(computing_s)
    network = fit_contention(found, NETWORK, [stock])
    assert predict_iteration_s(found, network, ddp) == pytest.approx(stock.iteration_s, rel=0.02)


def test_a_profile_that_was_not_disturbed_is_kept() -> None:
    profile, (ddp, *_) = instance()
    stock = measured(profile, under(Contention(computing=1.5, exchange=1.5)), ddp)
    for slowdown_s in (None, 0.0, stock.slowdown_s):
        same = stock._replace(slowdown_s=slowdown_s)
        assert corrected_by_baseline(same, profile, NETWORK) == (profile, NETWORK, same)


def test_what_no_contention_explains_is_waiting() -> None:
    """One message after the last gradient: nothing runs beside it that could slow it."""
    profile = waiting(instance()[0], 0.001)
    plan = PLANNERS["single"].plan(profile, NETWORK)
    alone_s = predict_iteration_s(profile, NETWORK, plan)
    for waited_s, noise_s in ((0.03, 0.0), (0.002, 0.005), (-0.0005, 0.0)):
        stock = Measured(plan, alone_s + waited_s, noise_s, slowdown_s=0.0)
        found, network, same = corrected_by_baseline(stock, profile, NETWORK)
        assert (network, same) == (NETWORK, stock)
        assert found.operations[:-1] == profile.operations[:-1]
        assert found.operations[-1].duration_s == pytest.approx(0.001 + waited_s, abs=1e-8)
        network = fit_contention(found, NETWORK, [stock])
        assert network.contention == Contention(fitted=True)


def test_computing_that_no_contention_explains_was_slower() -> None:
    profile, (ddp, *_) = instance()
    fast = Network.line(workers=4, a_s=1e-5, b_s_per_byte=1e-11)
    slowdown_s = 2 * profile.phase_s("forward", "backward")
    stock = Measured(ddp, predict_iteration_s(slowed(profile, 3), fast, ddp), 0.0, slowdown_s)
    found, network, stock = corrected_by_baseline(stock, profile, fast)
    assert network == fast
    assert found.phase_s("backward") == pytest.approx(3 * profile.phase_s("backward"))
    assert fit_contention(found, fast, [stock]).contention == Contention(fitted=True)


@pytest.mark.parametrize("faster", [1.2, 2.0, 3.5])
def test_messages_that_were_faster_than_in_the_probe(faster: float) -> None:
    """As on a GPU, where the probe waits for the device after each of them."""
    profile, (ddp, *_) = instance()
    profile = waiting(profile, 1e-5)
    curve = CostCurve.line(1e-4 / faster, 2e-9 / faster)
    probed = Network.line(workers=4, a_s=1e-4, b_s_per_byte=2e-9)
    truth = msgspec.structs.replace(probed, all_reduce=curve)
    stock = measured(profile, truth, ddp)._replace(slowdown_s=0.0)
    found, network, same = corrected_by_baseline(stock, profile, probed)
    assert same == stock
    assert found.operations[-1].duration_s == 0
    assert network.all_reduce.seconds(1 << 20) == pytest.approx(curve.seconds(1 << 20), rel=0.02)
    assert predict_iteration_s(found, network, ddp) == pytest.approx(stock.iteration_s, rel=2e-3)


def test_messages_do_not_explain_what_computing_takes() -> None:
    profile, (ddp, *_) = instance()
    stock = Measured(ddp, profile.computation_s / 2)
    found, network, _ = corrected_by_baseline(stock, profile, NETWORK)
    assert (found, network) == (profile, NETWORK)
