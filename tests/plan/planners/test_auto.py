"""The choice between planners."""

from __future__ import annotations

import msgspec
from hypothesis import given

from syncline.plan.network import Network
from syncline.plan.planners import planned
from syncline.plan.planners.auto import Auto, choose
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.overlap import Overlap
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.table import CANDIDATES
from syncline.plan.profile import Baseline, Profile
from syncline.plan.simulator.predict import predict
from tests import strategies as some

# DDP keeps these four in one bucket of 16 kB and sends it after 4 us; merging hides most of it.
PROFILE = some.profile_of([1_000_000] * 4, [1000] * 4)
NETWORK = Network.line(workers=4, a_s=1e-5, b_s_per_byte=1e-7)


@some.many
@given(some.layer_profiles(max_layers=12), some.integer_curves())
def test_the_choice_is_the_fastest_with_the_fewest_messages(
    profile: Profile, curve: some.IntegerCurve
) -> None:
    choice = choose(profile, curve.network())
    table = choice.comparison
    best_s = min(p.iteration_s for p in table.predictions)
    chosen = table.of(table.chosen)
    assert chosen.iteration_s == best_s <= table.of("ddp").iteration_s
    equals = [p.messages for p in table.predictions if p.iteration_s == best_s]
    assert chosen.planner == "ddp" or chosen.messages == min(equals)
    if table.of("ddp").iteration_s == best_s:
        assert chosen.planner == "ddp"
    assert choice.forecast.prediction == chosen
    assert choice.plan == choice.plans[table.chosen]
    assert choice.forecast == predict(profile, curve.network(), choice.plan)
    assert set(choice.plans) == {p.planner for p in table.predictions} == names()
    assert Auto().plan(profile, curve.network()) == choice.plan


def names(*, defers: bool = True) -> set[str]:
    """Return what training chooses from."""
    return {planner.NAME for planner in CANDIDATES} | ({"overlap"} if defers else set())


def with_noise(noise_s: float) -> Profile:
    baseline = Baseline(iteration_s=0.006, noise_s=noise_s, iterations=40)
    return msgspec.structs.replace(PROFILE, baseline=baseline)


def test_a_gain_above_the_noise_is_taken() -> None:
    table = choose(with_noise(1e-9), NETWORK).comparison
    assert table.chosen != "ddp"
    gain_s = table.of("ddp").iteration_s - table.of(table.chosen).iteration_s
    assert gain_s > 2e-9
    assert f"{gain_s * 1e3:.2f} ms" in table.reason
    assert "less an iteration than DDP's buckets" in table.reason


def test_a_gain_within_the_noise_is_not() -> None:
    without = choose(PROFILE, NETWORK).comparison
    gain_s = without.of("ddp").iteration_s - min(p.iteration_s for p in without.predictions)
    # Two standard errors decide.
    assert choose(with_noise(gain_s / 2 * 0.99), NETWORK).comparison.chosen != "ddp"
    table = choose(with_noise(gain_s / 2 * 1.01), NETWORK).comparison
    assert table.chosen == "ddp"
    assert "within the measured noise" in table.reason


def test_no_gain_keeps_ddp() -> None:
    free = Network.line(workers=4, a_s=0, b_s_per_byte=0)
    table = choose(PROFILE, free).comparison
    assert table.chosen == "ddp"
    assert table.reason == "no planner is predicted to be faster than DDP's buckets"


def test_of_equals_the_fewest_messages() -> None:
    # Latency is free and the third pair is what ends last: with or without merging the first two.
    profile = some.profile_of([10, 0, 10, 0, 10, 0], [1] * 6)
    network = some.IntegerCurve(((0, 0, 1),)).network()
    table = choose(profile, network, defers=False).comparison
    chosen = table.of(table.chosen)
    wfbp = table.of("wfbp")
    assert chosen.iteration_s == wfbp.iteration_s < table.of("ddp").iteration_s
    assert chosen.messages < wfbp.messages


def test_other_buckets_than_the_default_ones() -> None:
    table = choose(PROFILE, NETWORK, ddp=Ddp(first_bucket_bytes=1, bucket_bytes=1)).comparison
    assert table.of("ddp").messages == 4


@some.few
@given(some.layer_profiles(max_layers=8), some.integer_curves())
def test_others_are_compared_too(profile: Profile, curve: some.IntegerCurve) -> None:
    choice = choose(profile, curve.network(), others=[P3()])
    assert set(choice.plans) == names() | {"p3"}
    assert choice.deferring == {"overlap", "p3"}
    for name, plan in choice.plans.items():
        assert plan.wait == ("need" if name in choice.deferring else "update")
        assert choice.comparison.of(name) == predict(profile, curve.network(), plan).prediction
    table = choice.comparison
    assert table.of("overlap").iteration_s == min(p.iteration_s for p in table.predictions)


@some.few
@given(some.layer_profiles(max_layers=8), some.integer_curves())
def test_what_cannot_be_deferred_is_predicted_as_it_runs(
    profile: Profile, curve: some.IntegerCurve
) -> None:
    free, held = (
        choose(profile, curve.network(), others=[Overlap()], defers=defers)
        for defers in (True, False)
    )
    assert set(choose(profile, curve.network(), defers=False).plans) == names(defers=False)
    assert held.deferring == free.deferring == {"overlap"}
    assert held.plans["overlap"] == msgspec.structs.replace(free.plans["overlap"], wait="update")
    assert all(plan.wait == "update" for plan in held.plans.values())
    for name, plan in held.plans.items():
        assert held.comparison.of(name) == predict(profile, curve.network(), plan).prediction


def test_on_a_network_of_sparse_exchange_messages_are_what_training_sends() -> None:
    """Whole tensors, one message at a time: sparse messages are never decoupled."""
    profile = some.profile_of([1_000_000] * 4, [100_000] * 4, forward_ns=5_000_000)
    sparse = NETWORK.replace(density=0.01)
    ends = {0, 100_000, 200_000, 300_000, 400_000}
    for name in ("auto", "overlap", "dear", "bytescheduler"):
        plan = planned(name, profile, sparse)
        assert plan.in_flight == 1
        assert {m.collective for m in plan.messages} == {"all-reduce"}
        assert {m.stop for m in plan.messages} <= ends
    assert len(planned("dear", profile, NETWORK).messages) == 2 * len(
        planned("dear", profile, sparse).messages
    )


def test_a_planner_by_name_without_an_optimizer_that_defers() -> None:
    profile = some.profile_of([1_000_000] * 4, [100_000] * 4, forward_ns=5_000_000)
    assert planned("auto", profile, NETWORK).planner == "overlap"
    assert planned("auto", profile, NETWORK, defers=False).planner != "overlap"
    assert planned("p3", profile, NETWORK).wait == "need"
    held = planned("p3", profile, NETWORK, defers=False)
    assert held == P3().plan(profile, NETWORK).waiting_for_all()
