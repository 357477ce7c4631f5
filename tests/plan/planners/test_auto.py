"""The choice between planners, and the suggestion beside it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given

from syncline.plan.network import Link, Network
from syncline.plan.planners import planned
from syncline.plan.planners.auto import Auto, choose, suggestion
from syncline.plan.planners.compressed import planned_in
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.overlap import Overlap
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.table import CANDIDATES
from syncline.plan.prediction import Suggestion
from syncline.plan.profile import Baseline, Profile
from syncline.plan.simulator.predict import predict
from syncline.plan.sparse_costs import SparseSpeeds
from tests import strategies as some

# DDP keeps these four in one bucket of 16 kB and sends it after 4 us; merging hides most of it.
PROFILE = some.profile_of([1_000_000] * 4, [1000] * 4)
NETWORK = Network.line(workers=4, a_s=1e-5, b_s_per_byte=1e-7)


@some.many
@given(some.layer_profiles(max_layers=12), some.integer_curves())
def test_the_fastest_with_the_fewest_messages(profile: Profile, curve: some.IntegerCurve) -> None:
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


def test_only_a_gain_above_the_noise_is_taken() -> None:
    """Two standard errors decide."""
    without = choose(PROFILE, NETWORK).comparison
    gain_s = without.of("ddp").iteration_s - min(p.iteration_s for p in without.predictions)
    taken = choose(with_noise(gain_s / 2 * 0.99), NETWORK).comparison
    kept = choose(with_noise(gain_s / 2 * 1.01), NETWORK).comparison
    assert taken.chosen == without.chosen != "ddp"
    assert f"{gain_s * 1e3:.2f} ms" in taken.reason
    none = choose(PROFILE, Network.line(workers=4, a_s=0, b_s_per_byte=0)).comparison
    assert kept.chosen == none.chosen == "ddp"
    assert "within the measured noise" in kept.reason
    assert "no planner is predicted to be faster" in none.reason


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
def test_what_cannot_be_deferred(profile: Profile, curve: some.IntegerCurve) -> None:
    free = choose(profile, curve.network(), others=[Overlap()])
    held = choose(profile, curve.network(), others=[Overlap()], defers=False)
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
    dense, whole = (len(planned("dear", profile, n).messages) for n in (NETWORK, sparse))
    assert dense == 2 * whole


def test_a_planner_by_name_without_an_optimizer_that_defers() -> None:
    profile = some.profile_of([1_000_000] * 4, [100_000] * 4, forward_ns=5_000_000)
    assert planned("auto", profile, NETWORK).planner == "overlap"
    assert planned("auto", profile, NETWORK, defers=False).planner != "overlap"
    assert planned("p3", profile, NETWORK).wait == "need"
    held = planned("p3", profile, NETWORK, defers=False)
    assert held == P3().plan(profile, NETWORK).waiting_for_all()


# What compression would gain: predicted, said, and never chosen

GBIT = Link(alpha_s=20e-6, beta_s_per_byte=8e-9, gamma_s_per_byte=0.0)
FREE = SparseSpeeds(select_s_per_element=0.0, merge_s_per_entry=0.0)
FOUR_LAYERS = some.profile_of([50_000_000] * 4, [5_000_000] * 4)


def on(link: Link, workers: int, sparse: SparseSpeeds | None = FREE) -> Network:
    return Network.of_link(link, workers=workers, sparse=sparse)


def suggested(network: Network, profile: Profile = FOUR_LAYERS) -> Suggestion:
    found = choose(profile, network).comparison.suggestion
    assert found is not None
    return found


def test_a_slow_network_gets_a_suggestion_and_a_dense_plan() -> None:
    network = on(GBIT, 32)
    choice = choose(FOUR_LAYERS, network)
    found = choice.comparison.suggestion
    assert found is not None
    assert found.pays
    assert found.dense_s == choice.forecast.prediction.iteration_s
    # 80 MB need 1.24 s round a ring; a thousandth, twice as wide, in five rounds, hardly any time.
    assert found.gain > 4
    assert {message.collective for message in choice.plan.messages} == {"all-reduce"}
    assert choice.forecast == predict(FOUR_LAYERS, network, choice.plan)
    assert "gtop-k-butterfly at density 0.001 would take" in found.sentence
    assert "lossy" in found.sentence
    rounded = planned_in(Overlap(), FOUR_LAYERS, network, "bfloat16")
    assert found.rounded_s == predict(FOUR_LAYERS, network, rounded).prediction.iteration_s
    assert found.sentence.startswith("bfloat16 would take")
    eighth = planned_in(Overlap(), FOUR_LAYERS, network, "int8")
    assert found.int8_s == predict(FOUR_LAYERS, network, eighth).prediction.iteration_s
    assert "ask for it by compression='bfloat16' or 'int8'; gtop-k" in found.sentence
    assert choice.comparison.from_json(choice.comparison.to_json()) == choice.comparison


@pytest.mark.parametrize(("workers", "cheapest"), [(3, "top-k"), (32, "gtop-k-butterfly")])
def test_the_cheapest_sparse_exchange_is_taken(workers: int, cheapest: str) -> None:
    """All-gather with three workers: a fold costs the butterfly a round more."""
    assert suggested(on(GBIT, workers)).algorithm == cheapest


def test_where_communication_is_hidden_nothing_is_gained() -> None:
    fast = Link(alpha_s=1e-6, beta_s_per_byte=1e-12, gamma_s_per_byte=0.0)
    found = suggested(on(fast, 8))
    assert not found.pays
    assert found.sentence.startswith("would gain nothing: dense is as fast")


def test_slow_selection_gains_nothing_either() -> None:
    """16 bits still do, if nothing else is said."""
    slow = SparseSpeeds(select_s_per_element=1e-6, merge_s_per_entry=0.0)
    found = suggested(on(GBIT, 8, slow))
    assert found.gain < 1
    assert not found.pays
    assert found.sentence.endswith("ask for it by compression='bfloat16' or 'int8'")


def test_speeds_that_are_not_known_are_said_to_be_left_out() -> None:
    found = suggested(on(GBIT, 8, None))
    assert "if selecting took no time" in found.sentence
    assert not found.selecting_counted


@pytest.mark.parametrize(
    "network",
    [
        Network.of_link(GBIT, workers=1),
        Network.of_link(GBIT, workers=8, algorithm="gtop-k", density=0.01),
        Network.of_link(GBIT, workers=8, hosts=2, inside=GBIT),
    ],
    ids=["alone", "sparse", "hosts"],
)
def test_nothing_to_compare(network: Network) -> None:
    assert suggestion(FOUR_LAYERS, network, 1.0) is None


def test_a_line_without_a_link_has_one_inferred() -> None:
    line = Network.line(workers=8, a_s=1e-3, b_s_per_byte=14e-9)
    assert suggested(line).iteration_s < 0.3


@pytest.mark.parametrize("field", ["iteration_s", "dense_s"])
def test_an_impossible_time(field: str) -> None:
    made = suggested(on(GBIT, 8))
    with pytest.raises(ValueError, match=f"{field} must be finite and above 0"):
        msgspec.structs.replace(made, **{field: 0.0})


def test_a_gpu_s_way_through_the_host_is_not_counted_and_said_so() -> None:
    """Compression takes gradients of a GPU, and nobody has measured how fast."""
    on_a_gpu = msgspec.structs.replace(FOUR_LAYERS, device="cuda")
    for profile, said in ((FOUR_LAYERS, False), (on_a_gpu, True)):
        for link in (GBIT, Link(alpha_s=1e-6, beta_s_per_byte=1e-12, gamma_s_per_byte=0.0)):
            sentence = suggested(on(link, 32), profile).sentence
            assert ("if copying through the host took no time" in sentence) == said
