"""``overlap`` against exhaustive search, its bound and every other planner."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.cost import CostCurve
from syncline.plan.network import PRESETS, Contention, Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.overlap import Overlap, Round
from syncline.plan.planners.table import PUBLISHED
from syncline.plan.profile import Profile
from syncline.plan.simulator.bound import lower_bound_ns, terms
from syncline.plan.simulator.predict import predict, predict_iteration_s
from tests import strategies as some
from tests.cases import first_few
from tests.plan.planners import exhaustive
from tests.plan.planners.exhaustive import Instance, Kind, every_plan, instances, least_end_ns
from tests.plan.planners.instances import assert_best, chain, chains, iteration_s
from tests.trace_files import TRACES, all_traces


def round_of(instance: Instance) -> Round:
    """Return an instance as the product takes it."""
    bytes_each = [1] * len(instance.elements)
    return Round(instance.ready_ns, instance.elements, bytes_each, instance.tail_ns)


def searched_end_ns(instance: Instance, in_flight: int, exact_elements: int = 12) -> int:
    """Return when the round that the search finds ends."""
    curve = instance.curve.curve()
    found = round_of(instance).search(
        curve, in_flight=in_flight, goal_ns=0, budget=300_000, exact_elements=exact_elements
    )
    bounds = sorted(found)
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == sum(instance.elements)
    end = round_of(instance).end_ns(found, curve, in_flight)
    assert end == instance.end_ns(found, in_flight)
    return end


def one_period_s(profile: Profile, plan: Plan, network: Network) -> float:
    """Return max(base, end of the round) of a plan of all-reduces, without the simulator."""
    messages = [(m.start, m.stop) for m in plan.messages]
    round_ = Round.of(profile)
    end_ns = round_.end_ns(messages, network.all_reduce, plan.in_flight) if messages[0][1] else 0
    return max(terms(profile).base_ns, end_ns) / 1e9


@some.few
@given(instances(max_elements=5))
def test_the_oracle_is_the_best_of_all_plans(instance: Instance) -> None:
    for in_flight in (1, 2):
        everything = every_plan(sum(instance.elements))
        best = min(instance.end_ns(plan, in_flight) for plan in everything)
        assert least_end_ns(instance, in_flight) == best
        assert least_end_ns(instance, in_flight, best) is None


@some.many
@given(instances(max_elements=9), st.randoms(use_true_random=False))
def test_the_channel_is_as_stated(instance: Instance, shuffle: random.Random) -> None:
    total = sum(instance.elements)
    cuts = sorted(shuffle.sample(range(1, total), shuffle.randint(0, total - 1)))
    messages = list(itertools.pairwise([0, *cuts, total]))
    shuffle.shuffle(messages)
    for in_flight in (1, 2):
        end = round_of(instance).end_ns(messages, instance.curve.curve(), in_flight)
        assert end == instance.end_ns(messages, in_flight)


def test_an_element_is_needed_as_early_as_the_empty_tensor_that_travels_with_it() -> None:
    profile = chain([20e-9, 10e-9], [3, 0], [7e-9, 5e-9])
    round_ = Round.of(profile)
    assert round_ == Round([20, 30], [2, 1], [4, 4], [5, 12])
    network = Network.line(workers=2, a_s=100e-9, b_s_per_byte=1e-9)
    plan = msgspec.structs.replace(Overlap().own_plan(profile, network), in_flight=1)
    for messages in ([(0, 3)], [(0, 2), (2, 3)], [(2, 3), (0, 2)]):
        cut = tuple(Message(start=start, stop=stop) for start, stop in messages)
        other = msgspec.structs.replace(plan, messages=cut)
        simulated = predict_iteration_s(profile, network, other)
        assert simulated == pytest.approx(one_period_s(profile, other, network), abs=1e-12)


@some.many
@given(instances(max_elements=7))
def test_small_rounds_are_optimal(instance: Instance) -> None:
    for in_flight in (1, 2):
        assert searched_end_ns(instance, in_flight) == least_end_ns(instance, in_flight)


@pytest.mark.parametrize("kind", exhaustive.KINDS, ids=str)
def test_the_search_alone_is_nearly_always_optimal(kind: Kind) -> None:
    """Without the exact solution of small rounds, which larger ones cannot have."""
    draw = random.Random(kind.seed)
    missed = 0
    for _ in range(20):
        instance = exhaustive.random_instance(draw, 9, kind)
        for in_flight in (1, 2):
            found = searched_end_ns(instance, in_flight, exact_elements=0)
            best = least_end_ns(instance, in_flight, found)
            missed += best is not None
            assert found <= 1.05 * (best or found)
    assert missed <= 2


@some.few
@given(instances(max_elements=9), st.randoms(use_true_random=False))
def test_the_result_is_no_worse_than_a_seed(instance: Instance, shuffle: random.Random) -> None:
    total = sum(instance.elements)
    seed = [(i, i + 1) for i in range(total)]
    shuffle.shuffle(seed)
    curve = instance.curve.curve()
    round_ = round_of(instance)
    found = round_.search(curve, in_flight=2, goal_ns=0, seeds=[seed], budget=0, exact_elements=0)
    assert round_.end_ns(found, curve, 2) <= round_.end_ns(seed, curve, 2)


@some.many
@given(chains(), some.integer_curves(falls=True))
def test_no_other_planner_is_better(profile: Profile, curve: some.IntegerCurve) -> None:
    network = curve.network(profile.workers)
    ours = assert_best(Overlap(), profile, network, PUBLISHED)
    for planner in PUBLISHED:
        on_need = msgspec.structs.replace(planner.plan(profile, network), wait="need")
        assert ours <= predict_iteration_s(profile, network, on_need), planner.NAME


@some.few
@given(chains(), some.integer_curves(falls=True), some.integer_curves(falls=True))
def test_no_other_planner_is_better_where_two_at_once_were_measured(
    profile: Profile, alone: some.IntegerCurve, two: some.IntegerCurve
) -> None:
    network = alone.network(profile.workers, two)
    forecast = predict(profile, network, Overlap().plan(profile, network)).prediction
    assert forecast.lower_bound_s <= forecast.iteration_s
    for planner in PUBLISHED:
        plan = planner.plan(profile, network)
        if plan.wait == "need":  # sent in a row, two at once: as measured
            plan = msgspec.structs.replace(plan, in_flight=max(plan.in_flight, 2))
        if plan.in_flight <= 2:
            other = predict_iteration_s(profile, network, plan)
            assert forecast.iteration_s <= other, planner.NAME


def test_decoupled_ones_may_be_sent_in_rows_as_well() -> None:
    """Of a message that nothing hides, an odd nanosecond is saved by rounding two parts."""
    profile = chain([0.0], [1], [0.0])
    two, alone = some.IntegerCurve(((0, 977, 0),)), some.IntegerCurve(((0, 957, 5),))
    network = alone.network(profile.workers, two)
    plan = Overlap().plan(profile, network)
    assert [m.collective for m in plan.messages] == ["reduce-scatter", "all-gather"]
    assert plan.in_flight == 2


@some.few
@given(chains(), some.integer_curves(falls=True), some.contentions(3))
def test_best_under_contention(profile: Profile, curve: some.IntegerCurve, by: Contention) -> None:
    network = msgspec.structs.replace(curve.network(profile.workers), contention=by)
    assert_best(Overlap(), profile, network, PUBLISHED)


@some.many
@given(
    st.one_of(some.layer_profiles(), chains(min_elements=0)),
    some.integer_curves(falls=True),
    st.sampled_from([1, 2]),
)
def test_search_is_simulated(profile: Profile, curve: some.IntegerCurve, in_flight: int) -> None:
    """Also tensors without elements, and updates."""
    network = curve.network(profile.workers)
    own = Overlap(in_flight=in_flight).own_plan(profile, network)
    assert own.wait == "need"
    assert own.in_flight <= in_flight
    if profile.gradient_bytes:
        simulated = predict_iteration_s(profile, network, own)
        assert simulated == pytest.approx(one_period_s(profile, own, network), abs=1e-12)
    assert_best(Overlap(), profile, network, PUBLISHED)


@pytest.mark.parametrize("network", first_few(PRESETS.values()), ids=PRESETS)
def test_it_is_near_the_bound_on_measured_traces(network: Network) -> None:
    if not TRACES.is_dir():
        pytest.skip(f"no traces: {TRACES} is absent")
    for profile in all_traces():
        ours = assert_best(Overlap(), profile, network, PUBLISHED)
        bound_ns = lower_bound_ns(terms(profile), network.all_reduce)
        assert bound_ns / 1e9 <= ours <= 1.01 * bound_ns / 1e9, profile.model


def test_a_large_tensor_is_cut_for_the_one_that_is_needed_first() -> None:
    """Layer 1 is ready last and needed first; the large layer 2 must not be in its way."""
    profile = chain([0.01, 0.03], [10_000_000, 1000], [0.01, 0.05])
    network = Network.line(workers=4, a_s=1e-3, b_s_per_byte=1e-9)
    plan = Overlap().plan(profile, network)
    urgent = next(i for i, m in enumerate(plan.messages) if m.stop == 10_001_000)
    assert 0 < urgent < len(plan.messages) - 1
    assert all(m.stop <= 10_000_000 for m in plan.messages[:urgent])
    ours = predict_iteration_s(profile, network, plan)
    others = (PLANNERS[name] for name in ("wfbp", "single", "merge", "tictac"))
    whole = min(iteration_s(profile, network, planner) for planner in others)
    # The small tensor alone would be too short to hide the latency of what follows it, 1 ms: half
    # a millisecond of the large one goes with it, and both end at the same time.
    assert ours == pytest.approx(0.1015, abs=1e-5)
    assert whole > 1.05 * ours


def test_there_are_fewer_messages_where_each_takes_time_from_computing() -> None:
    profile = some.profile_of([2_000_000] * 40, [100_000] * 40, forward_ns=40_000_000)
    profile = msgspec.structs.replace(profile, norm="2")
    free = Network.line(workers=4, a_s=1e-4, b_s_per_byte=8e-9)
    costly = msgspec.structs.replace(free, contention=Contention(per_message_s=2e-3))
    without, ours = Overlap().plan(profile, free), Overlap().plan(profile, costly)
    without_s, ours_s = (predict_iteration_s(profile, costly, plan) for plan in (without, ours))
    assert len(ours.messages) < len(without.messages)
    assert ours_s < 0.95 * without_s


def test_a_round_that_is_hidden_needs_few_messages() -> None:
    profile = some.profile_of([10_000_000] * 20, [100] * 20, forward_ns=100_000_000)
    plan = Overlap().plan(profile, Network.line(workers=4, a_s=1e-5, b_s_per_byte=1e-9))
    assert (len(plan.messages), plan.in_flight) == (1, 1)


def test_no_message_is_sent_beyond_a_jump_because_it_is_hidden() -> None:
    """Above 32 MiB messages take seven times as long, and computing would hide even those."""
    nine_s = 9_000_000_000
    profile = some.profile_of([nine_s] * 4, [6 << 20] * 4, forward_ns=nine_s)
    gradients = tuple(msgspec.structs.replace(g, needed_by=0) for g in profile.gradients)
    profile = msgspec.structs.replace(profile, gradients=gradients)
    jump, rate = 32 << 20, 1e-9
    rows = [(0, 1e-4, rate), (jump, 7 * rate * jump, 7 * rate)]
    network = msgspec.structs.replace(PRESETS["10gbit"], all_reduce=CostCurve.of_rows(rows))
    plan = Overlap().plan(profile, network)
    assert max(plan.message_bytes()) < jump
    assert len(plan.messages) <= 5


@pytest.mark.parametrize("count", [300, 1000, 5000])
def test_many_tensors(count: int) -> None:
    draw = random.Random(count)
    profile = some.profile_of(
        [draw.randint(0, 20_000) for _ in range(count)],
        [draw.randint(0, 5000) for _ in range(count)],
        forward_ns=count * 5000,
    )
    network = Network.line(workers=16, a_s=1e-6, b_s_per_byte=1e-9)
    planner = Overlap(budget=1_000_000)
    own = planner.own_plan(profile, network)
    assert count > 300 or own == planner.own_plan(profile, network)  # it is deterministic
    bound_ns = lower_bound_ns(terms(profile), network.all_reduce)
    assert predict_iteration_s(profile, network, own) * 1e9 <= 1.01 * bound_ns


def test_what_takes_too_long_is_refused() -> None:
    profile = some.profile_of([5, 5], [1000, 1000])
    network = Network.line(workers=4, a_s=1.0, b_s_per_byte=1e3)
    with pytest.raises(UserError, match=r"overlap: network 'line' needs longer than 70369 s"):
        Overlap().plan(profile, network)
