"""Our merge against exhaustive search, and against every other planner."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from syncline.plan.network import PRESETS, Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.planners.merge import Merge
from syncline.plan.planners.table import CANDIDATES
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict, predict_iteration_s
from tests import strategies as some
from tests.cases import first_few
from tests.plan.planners.instances import assert_best, finish, iteration_s, partitions, ready_ns
from tests.trace_files import ESPRESSO, PIPEDREAM, TRACES, read_espresso, read_pipedream

FLAT = some.IntegerCurve(((0, 5, 1),))


def best_by_search(profile: Profile, curve: some.IntegerCurve) -> float:
    """Return the earliest end of the last message over all partitions."""
    ready = ready_ns(profile)
    sizes = [gradient.size_bytes for gradient in profile.gradients]
    return min(finish(ready, sizes, cuts, curve.cost_ns) for cuts in partitions(len(sizes)))


@some.many
@given(some.layer_profiles(max_layers=10), some.integer_curves())
@example(some.profile_of([1, 49, 50], [5, 5, 0]), FLAT)  # the empty tensor delays the second
@example(some.profile_of([1, 49, 50], [0, 5, 5]), FLAT)
@example(some.profile_of([1, 1, 1], [0, 0, 0]), FLAT)
@example(some.profile_of([0, 0, 0], [5, 5, 5]), FLAT)
def test_no_partition_is_better(profile: Profile, curve: some.IntegerCurve) -> None:
    network = curve.network()
    plan = Merge().plan(profile, network)
    cuts = Merge().last_tensors(profile, network)
    sizes = [gradient.size_bytes for gradient in profile.gradients]
    best = best_by_search(profile, curve)
    assert finish(ready_ns(profile), sizes, cuts, curve.cost_ns) == best
    # And the simulator agrees on what the plan takes, to the nanosecond.
    computing = sum(round(o.duration_s * 1e9) for o in profile.operations if o.phase != "update")
    update = round(profile.phase_s("update") * 1e9)
    timeline = predict(profile, network, plan).timeline
    assert timeline.iteration_ns == max(best, computing) + update


@some.many
@given(some.layer_profiles(max_layers=8), some.integer_curves(falls=True))
def test_where_costs_fall_it_is_no_later(profile: Profile, curve: some.IntegerCurve) -> None:
    sizes = [gradient.size_bytes for gradient in profile.gradients]
    cuts = Merge().last_tensors(profile, curve.network())
    costs = {sum(sizes[i:j]) for i in range(len(sizes)) for j in range(i, len(sizes) + 1)}
    ends = {start - 1 for start, _, _ in curve.segments[1:]}
    highest = {m: max(curve.cost_ns(end) for end in (m, *ends) if end <= m) for m in costs}
    found = finish(ready_ns(profile), sizes, cuts, curve.cost_ns)
    planned = finish(ready_ns(profile), sizes, cuts, highest.__getitem__)
    assert found <= planned
    ways = partitions(len(sizes))
    assert planned == min(finish(ready_ns(profile), sizes, w, highest.__getitem__) for w in ways)


@some.few
@given(some.layer_profiles(max_layers=6), some.integer_curves(), st.sampled_from([1.25, 2.0, 4.0]))
def test_none_is_better_slowed(profile: Profile, curve: some.IntegerCurve, factor: float) -> None:
    contention = Contention(exchange=factor)
    network = msgspec.structs.replace(curve.network(), contention=contention)
    ways = partitions(len(profile.gradients))
    tried = (Plan.merging("search", profile, 4, cuts) for cuts in ways)
    best_s = min(predict_iteration_s(profile, network, plan) for plan in tried)
    # Ready times are rounded on the way: a nanosecond a message.
    least_ns = round(best_s * 1e9)
    assert iteration_s(profile, network, Merge()) * 1e9 <= least_ns * 1.0001 + 8


@pytest.mark.parametrize("network", first_few(PRESETS.values(), 2), ids=PRESETS)
@pytest.mark.parametrize("trace", [*ESPRESSO, *PIPEDREAM])
def test_no_other_planner_is_better_on_measured_traces(trace: str, network: Network) -> None:
    if not TRACES.is_dir():
        pytest.skip(f"no traces: {TRACES} is absent")
    if trace in ESPRESSO:
        profile = read_espresso(TRACES / "espresso" / f"{trace}.json")
    else:
        profile = read_pipedream(TRACES / "pipedream" / f"{trace}.graph.txt")
    assert_best(Merge(), profile, network, CANDIDATES)


def test_the_clock_is_the_simulators() -> None:
    """Rounded sums of durations differ from sums of rounded ones; plans must use the latter."""
    third = 1e-9 / 3  # rounds to 0 ns each, but 3000 of them take 1000 ns
    profile = some.profile_of([0] * 3000, [1] * 3000)
    operations = (msgspec.structs.replace(o, duration_s=third) for o in profile.operations)
    profile = msgspec.structs.replace(profile, operations=tuple(operations))
    network = Network.line(workers=4, a_s=10e-9, b_s_per_byte=0)
    assert Merge().last_tensors(profile, network) == [2999]


@pytest.mark.parametrize("count", first_few([1000, 10_000]))
def test_many_tensors(count: int) -> None:
    random_ = random.Random(count)
    profile = some.profile_of(
        [random_.randint(0, 20_000) for _ in range(count)],
        [random_.randint(0, 5000) for _ in range(count)],
    )
    network = Network.line(workers=16, a_s=1e-6, b_s_per_byte=1e-9)
    times = {planner.NAME: iteration_s(profile, network, planner) for planner in CANDIDATES}
    assert times["merge"] == min(times.values())
    assert times["merge"] < times["wfbp"]
    assert times["merge"] < times["single"]
