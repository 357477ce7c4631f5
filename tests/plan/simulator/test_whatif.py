"""What-if: transformations, lists of changes, points."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.network import Link, Network
from syncline.plan.planners import PLANNERS
from syncline.plan.profile import Baseline, Profile
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.predict import predict, predict_computation_s
from syncline.plan.simulator.strategy import STRATEGIES
from syncline.plan.simulator.study import study
from syncline.plan.simulator.transformations import (
    with_accumulation,
    with_batch,
    with_compute_scale,
    with_sharding,
    with_wire,
    without_loading,
)
from syncline.plan.simulator.whatif import Change, WhatIfSimulator, changes, exchanges
from syncline.plan.simulator.workers import ALIKE, Workers
from tests import strategies as some
from tests.plan.simulator.chains import chain, gradient, job, line, op

GBIT = 125e6
LINK = Link(alpha_s=20e-6, beta_s_per_byte=1 / (10 * GBIT), gamma_s_per_byte=0.0)
NETWORK = Network.of_link(LINK, workers=16, name="10gbit")
ALONE = line(0, 0, workers=1)
PROFILE = some.profile_of(
    [2_000_000] * 5, [2_000_000, 10, 500_000, 0, 800_000], forward_ns=4 * 10**6
)


def computation_s(profile: Profile) -> float:
    """Return the iteration time of one worker, which exchanges nothing."""
    return predict_computation_s(Scenario(profile, ALONE))


def simulator(
    *planners: str, profile: Profile = PROFILE, network: Network = NETWORK
) -> WhatIfSimulator:
    names = planners or ("ddp", "merge")
    return WhatIfSimulator(profile, network, {name: PLANNERS[name].plan for name in names})


def test_a_wire_type_halves_the_bytes() -> None:
    halved = with_wire(PROFILE, "bfloat16")
    assert halved.gradient_bytes * 2 == PROFILE.gradient_bytes
    assert with_wire(PROFILE, "float32") is PROFILE
    assert with_wire(halved, "float32") == PROFILE


def test_a_measured_baseline_does_not_outlive_a_change() -> None:
    measured = msgspec.structs.replace(
        PROFILE, baseline=Baseline(iteration_s=1.0, noise_s=0.1, iterations=5)
    )
    assert with_wire(measured, "float16").baseline is None
    assert with_compute_scale(measured, 0.5).baseline is None
    assert with_compute_scale(measured, 1.0) is measured


def test_complex_gradients_do_not_travel_as_real_ones() -> None:
    gradients = (msgspec.structs.replace(PROFILE.gradients[0], dtype="complex64"),)
    profile = msgspec.structs.replace(PROFILE, gradients=gradients)
    with pytest.raises(UserError, match="'g0' is complex64 and cannot travel as bfloat16"):
        with_wire(profile, "bfloat16")
    assert with_wire(profile, "complex128").gradient_bytes == 2 * profile.gradient_bytes


def test_each_of_some_workers_updates_its_share() -> None:
    whole = some.profile_of([1000, 1000], [100, 100], update_ns=8000)
    sharded = with_sharding(whole, 4)
    assert (sharded.sharded, sharded.workers, sharded.phase_s("update")) == (True, 4, 2e-6)
    assert with_sharding(sharded, 8).phase_s("update") == 1e-6
    assert with_sharding(sharded, None) == whole


def test_a_plan_without_gathers_gathers_parameters_after_a_sharded_update() -> None:
    whole = some.profile_of([2_000_000] * 3, [2_000_000] * 3, update_ns=16 * 10**6)
    sharded = with_sharding(whole, NETWORK.workers)
    ddp = PLANNERS["ddp"].plan(whole, NETWORK)
    gathered_s = NETWORK.collective("all-gather").seconds(whole.gradient_bytes)
    forecast = predict(sharded, NETWORK, ddp)
    longer_s = forecast.prediction.iteration_s - predict(whole, NETWORK, ddp).prediction.iteration_s
    assert longer_s == pytest.approx(gathered_s - 15e-3, abs=1e-6)
    assert "gather parameters" in {span.label for span in forecast.timeline.spans}
    assert forecast.prediction.computation_s == sharded.computation_s
    point = simulator("ddp", profile=sharded).point(Change(workers=NETWORK.workers))
    assert point.of("ddp") == forecast.prediction
    overlapped = PLANNERS["overlap"].plan(sharded, NETWORK)
    assert overlapped.sharded
    spans = predict(sharded, NETWORK, overlapped).timeline.spans
    assert "gather parameters" not in {span.label for span in spans}


def test_more_workers_update_less_each() -> None:
    whole = some.profile_of([2_000_000] * 3, [200] * 3, update_ns=16 * 10**6)
    swept = simulator("ddp", profile=with_sharding(whole, 16))
    few, many = (swept.plan_at(Change(workers=count), "ddp").scenario.profile for count in (4, 32))
    assert few.operations[-2].duration_s == pytest.approx(4e-3)
    assert many.operations[-2].duration_s == pytest.approx(0.5e-3)
    alone_s = [swept.point(Change(workers=count)).alone_s for count in (4, 32)]
    assert alone_s[0] - alone_s[1] == pytest.approx(3.5e-3)


def test_a_larger_batch_leaves_launching_the_update_and_what_is_fixed() -> None:
    profile = chain([100], [200], [10], io=30, h2d=20, update=50)
    found = with_batch(profile, 2.0, fixed=0.25)
    times_ns = {o.phase: round(o.duration_s * 1e9) for o in found.operations}
    assert times_ns == {"data": 60, "copy": 40, "forward": 175, "backward": 350, "update": 50}
    assert with_batch(profile, 1.0, fixed=0.5) is profile
    with pytest.raises(UserError, match=r"between 0\.001 and 1000 times"):
        with_batch(profile, 0.0)
    with pytest.raises(UserError, match=r"between 0 and 1, found 1\.5"):
        with_batch(profile, 2.0, fixed=1.5)


def test_a_compute_scale_leaves_loading_and_launching() -> None:
    profile = chain([10, 20], [30, 40], [1, 1], io=7, h2d=3, update=5)
    launch = op("update", 9, resource="host")
    profile = msgspec.structs.replace(profile, operations=(*profile.operations, launch))
    after = [o.duration_s * 1e9 for o in with_compute_scale(profile, 0.5).operations]
    assert after == pytest.approx([7, 3, 5, 10, 20, 15, 2.5, 9])


def test_accumulation_exchanges_once_for_several_batches() -> None:
    profile = chain([10, 20], [30, 40], [1, 1], io=7, h2d=3, update=5)
    four = with_accumulation(profile, 4)
    # Four readings and copies; a forward pass, three times both passes, a backward pass; an update.
    durations = [round(o.duration_s * 1e9) for o in four.operations]
    assert durations == [28, 12, 10, 20, 300, 40, 30, 5]
    assert four.computation_s * 1e9 == pytest.approx(4 * (7 + 3 + 100) + 5)
    assert [g.needed_by for g in four.gradients] == [g.needed_by for g in profile.gradients]
    first, last = profile.operations, four.operations
    for before, after in zip(profile.gradients, four.gradients, strict=True):
        assert last[after.ready_after].name == first[before.ready_after].name
    assert with_accumulation(profile, 1) is profile
    with pytest.raises(UserError, match="no backward pass of a single batch"):
        with_accumulation(four, 2)


def test_accumulation_with_a_host_that_launches() -> None:
    profile = chain([10, 20], [30, 40], [1, 1], update=5)
    profile = job(
        [op("forward", 9, resource="host"), *profile.operations],
        *(
            gradient(1, g.ready_after + 1, (g.needed_by or 0) + 1, g.name)
            for g in profile.gradients
        ),
    )
    one, three = (computation_s(with_accumulation(profile, n)) for n in (1, 3))
    # Each waits for its launch, as a batch alone.
    assert three == pytest.approx(one + 2 * (9 + 100) * 1e-9)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-4, 1e4, float("inf"), float("nan")])
def test_an_absurd_compute_scale(scale: float) -> None:
    with pytest.raises(UserError, match="a compute scale must be between"):
        with_compute_scale(PROFILE, scale)


@some.few
@given(profile=some.layer_profiles(), scale=st.sampled_from([0.25, 0.5, 2.0, 3.0]))
def test_scaling_computing_scales_what_has_no_communication(profile: Profile, scale: float) -> None:
    before = computation_s(profile)
    after = computation_s(with_compute_scale(profile, scale))
    rounding_s = 1e-9 * len(profile.operations)
    assert after == pytest.approx(scale * before, abs=rounding_s)


def test_without_loading() -> None:
    profile = chain([10], [20], [1], io=100, h2d=50, update=5)
    assert without_loading(profile).computation_s == pytest.approx(35e-9)


@pytest.mark.parametrize(
    ("names", "densities", "pairs"),
    [
        ([], [], [(None, None)]),
        (["ring"], [], [("ring", None)]),
        ([], [0.001], [(None, 0.001)]),
        ([], [None, 0.001], [(None, None), (None, 0.001)]),
        (["ring", "two-tree"], [0.01], [("ring", None), ("two-tree", None), (None, 0.01)]),
        (["ring", "top-k"], [0.01, 0.1], [("ring", None), ("top-k", 0.01), ("top-k", 0.1)]),
        (["ring"], [None, 0.01], [("ring", None), (None, 0.01)]),
        (["gtop-k"], [None, 0.01], [(None, None), ("gtop-k", 0.01)]),
        (["gtop-k"], [], [("gtop-k", None)]),
    ],
)
def test_algorithms_and_densities(
    names: list[str], densities: list[float | None], pairs: list[tuple[str | None, float | None]]
) -> None:
    assert exchanges(names, densities) == pairs


def test_all_combinations_with_workers_fastest() -> None:
    made = changes(
        workers=[4, 8],
        bandwidth_bytes_per_s=[GBIT, 10 * GBIT],
        wire=["float32", "bfloat16"],
        strategy=[STRATEGIES["loop"], STRATEGIES["cntk"]],
    )
    assert len(made) == 16
    assert [c.workers for c in made[:4]] == [4, 8, 4, 8]
    assert [c.strategy.name for c in made] == ["loop"] * 8 + ["cntk"] * 8
    assert len(set(made)) == 16


def test_no_options_are_one_point() -> None:
    assert changes() == [Change()]


def test_absurdly_many_points_are_refused_at_once() -> None:
    with pytest.raises(UserError, match="stand for 1000000000 points, and at most 5000"):
        changes(workers=range(1, 10**6 + 1), compute_scale=[1 + i * 1e-3 for i in range(1000)])


def test_a_point_without_changes_is_what_predict_says() -> None:
    point = simulator().point(Change())
    for prediction in point.predictions:
        plan = PLANNERS[prediction.planner].plan(PROFILE, NETWORK)
        assert prediction == predict(PROFILE, NETWORK, plan).prediction
    assert point.setting.workers == 16
    assert point.alone_s == point.computing_s == PROFILE.computation_s


def test_a_point_with_everything() -> None:
    change = Change(
        workers=64,
        bandwidth_bytes_per_s=25 * GBIT,
        latency_s=5e-6,
        algorithm="two-tree",
        wire="bfloat16",
        compute_scale=0.5,
        behaviour=Workers(stragglers=((2, 1.3),)),
        strategy=STRATEGIES["pytorch"],
    )
    point = simulator("merge").point(change)
    link = Link(alpha_s=5e-6, beta_s_per_byte=1 / (25 * GBIT), gamma_s_per_byte=0.0)
    network = Network.of_link(link, workers=64, algorithm="two-tree")
    profile = with_compute_scale(with_wire(PROFILE, "bfloat16"), 0.5)
    run = {"strategy": change.strategy, "workers": change.behaviour}
    expected = predict(profile, network, PLANNERS["merge"].plan(profile, network), **run)  # type: ignore[arg-type]
    iteration_s = expected.prediction.iteration_s
    assert point.predictions[0].iteration_s == pytest.approx(iteration_s, rel=1e-9)
    for field in ("workers", "algorithm", "wire", "compute_scale"):
        assert getattr(point.setting, field) == getattr(change, field)
    assert (point.setting.strategy, point.setting.stragglers) == ("pytorch", ((2, 1.3),))


def test_efficiency_counts_stragglers_and_communication() -> None:
    point = simulator("merge").point(Change(workers=2, behaviour=Workers(stragglers=((1, 2.0),))))
    best = point.best
    assert best.computation_s == pytest.approx(2 * PROFILE.computation_s, rel=1e-6)
    assert point.efficiency(best) == pytest.approx(PROFILE.computation_s / best.iteration_s)
    assert point.speed_up(best) == pytest.approx(2 * point.efficiency(best))
    assert point.split(best).straggling_s == pytest.approx(PROFILE.computation_s, rel=1e-6)


def test_a_sparse_exchange_of_narrow_elements_still_sends_whole_indices() -> None:
    found = simulator("single")
    wide = found.network_at(Change(density=0.01)).all_reduce.segments[0].s_per_byte
    narrow = found.network_at(Change(density=0.01, wire="bfloat16")).all_reduce.segments[0]
    # An element of 4 bytes travels as 8, one of 2 bytes as 6: each a byte of its own.
    assert narrow.s_per_byte * 2 == pytest.approx(wide * 4 * 6 / 8)
    assert narrow.cost_s == pytest.approx(4 * 20e-6)


def test_what_the_network_refuses() -> None:
    with pytest.raises(UserError, match="needs a density"):
        simulator().point(Change(algorithm="gtop-k"))


settings = st.builds(
    Change,
    workers=st.sampled_from([1, 2, 7, 64]),
    bandwidth_bytes_per_s=st.sampled_from([None, GBIT, 100 * GBIT]),
    latency_s=st.sampled_from([None, 0.0]),
    algorithm=st.none(),
    density=st.sampled_from([None, 0.01]),
    jobs=st.sampled_from([None, 1, 2]),
    wire=st.sampled_from([None, "bfloat16"]),
    compute_scale=st.sampled_from([0.5, 1.0, 2.0]),
    batch=st.sampled_from([0.5, 1.0, 4.0]),
    batch_fixed=st.sampled_from([0.0, 0.3]),
    accumulate=st.sampled_from([1, 3]),
    behaviour=st.sampled_from([ALIKE, Workers(spread=0.2), Workers(stragglers=((0, 1.5),))]),
    strategy=st.sampled_from(list(STRATEGIES.values())),
).filter(lambda change: change.density is None or change.strategy.exchange == "all-reduce")


@some.few
@given(change=settings, io=st.integers(0, 50_000_000))
def test_the_parts_of_an_iteration_add_up(change: Change, io: int) -> None:
    profile = chain([10**6, 2 * 10**6], [3 * 10**6, 10**6], [10**6, 10**5], io=io, update=10**5)
    point = simulator(profile=profile).point(change)
    for prediction in point.predictions:
        split = point.split(prediction)
        assert split.iteration_s == pytest.approx(prediction.iteration_s)
        assert min(msgspec.structs.astuple(split)) >= 0
        assert sum(split.shares.values()) == pytest.approx(1)


def test_faster_links_and_narrower_wires_do_no_harm() -> None:
    found = simulator("merge")
    times = [
        found.point(Change(bandwidth_bytes_per_s=rate * GBIT, wire=wire)).best.iteration_s
        for wire in ("float64", "float32", "bfloat16")
        for rate in (1, 10, 100)
    ]
    for row in (times[0:3], times[3:6], times[6:9], times[::3], times[2::3]):
        assert row == sorted(row, reverse=True)


def test_a_study() -> None:
    seen: list[Change] = []

    def track(given: Sequence[Change]) -> Sequence[Change]:
        seen.extend(given)
        return given

    points = changes(
        workers=[4, 16, 64], bandwidth_bytes_per_s=[GBIT, 10 * GBIT], wire=["bfloat16"]
    )
    made = study(simulator(), points, model="m", notes=("said",), track=track)
    assert seen == points
    assert [p.setting.workers for p in made.points] == [4, 16, 64] * 2
    assert made.bottleneck.point == 2
    assert made.planners == ("ddp", "merge")
    assert made.swept == ("workers", "bandwidth_bytes_per_s")
    assert made.notes[0] == "said"
    assert "Converting gradients" in made.notes[1]


def test_a_point_that_is_not_there() -> None:
    with pytest.raises(UserError, match="there is no point 4; the sweep has 3 points"):
        study(simulator(), changes(workers=[1, 2, 3]), model="m", chosen=3)


def test_what_is_left_out_is_said() -> None:
    def notes(**lists: object) -> str:
        made = study(simulator("single"), changes(**lists), model="m")  # type: ignore[arg-type]
        return " ".join(made.notes)

    assert notes() == ""
    assert "Selecting and merging" in notes(densities=[0.01])
    assert "A compute scale leaves" in notes(compute_scale=[0.5])
