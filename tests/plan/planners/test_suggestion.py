"""What compression would gain: predicted, said, and never chosen."""

from __future__ import annotations

import msgspec
import pytest

from syncline.plan.network import Link, Network
from syncline.plan.planners.auto import choose, suggestion
from syncline.plan.planners.compressed import planned_in
from syncline.plan.planners.overlap import Overlap
from syncline.plan.prediction import Suggestion
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.predict import predict
from syncline.plan.sparse_costs import SparseSpeeds

GBIT = Link(alpha_s=20e-6, beta_s_per_byte=8e-9, gamma_s_per_byte=0.0)
FREE = SparseSpeeds(select_s_per_element=0.0, merge_s_per_entry=0.0)
PROFILE = Profile(
    model="four layers",
    device="cpu",
    workers=1,
    iterations=1,
    operations=tuple(
        Operation(name=f"b{i}", phase="backward", duration_s=0.05, after=(i - 1,) if i else ())
        for i in range(4)
    ),
    gradients=tuple(Gradient(name=f"g{i}", elements=5_000_000, ready_after=i) for i in range(4)),
)


def on(link: Link, workers: int, sparse: SparseSpeeds | None = FREE) -> Network:
    return Network.of_link(link, workers=workers, sparse=sparse)


def test_a_slow_network_gets_a_suggestion_and_a_dense_plan() -> None:
    network = on(GBIT, 32)
    choice = choose(PROFILE, network)
    found = choice.comparison.suggestion
    assert found is not None
    assert found.pays
    assert found.dense_s == choice.forecast.prediction.iteration_s
    # 80 MB need 1.24 s round a ring; a thousandth, twice as wide, in five rounds, hardly any time.
    assert found.gain > 4
    assert {message.collective for message in choice.plan.messages} == {"all-reduce"}
    assert choice.forecast == predict(PROFILE, network, choice.plan)
    assert "gtop-k-butterfly at density 0.001 would take" in found.sentence
    assert "lossy" in found.sentence
    rounded = planned_in(Overlap(), PROFILE, network, "bfloat16")
    assert found.rounded_s == predict(PROFILE, network, rounded).prediction.iteration_s
    assert found.sentence.startswith("bfloat16 would take")
    eighth = planned_in(Overlap(), PROFILE, network, "int8")
    assert found.int8_s == predict(PROFILE, network, eighth).prediction.iteration_s
    assert "ask for it by compression='bfloat16' or 'int8'; gtop-k" in found.sentence
    assert choice.comparison.from_json(choice.comparison.to_json()) == choice.comparison


@pytest.mark.parametrize(("workers", "cheapest"), [(3, "top-k"), (32, "gtop-k-butterfly")])
def test_the_cheapest_sparse_exchange_is_taken(workers: int, cheapest: str) -> None:
    """All-gather with three workers: a fold costs the butterfly a round more."""
    found = suggestion(PROFILE, on(GBIT, workers), 1.0)
    assert found is not None
    assert found.algorithm == cheapest


def test_where_communication_is_hidden_nothing_is_gained() -> None:
    fast = Link(alpha_s=1e-6, beta_s_per_byte=1e-12, gamma_s_per_byte=0.0)
    found = choose(PROFILE, on(fast, 8)).comparison.suggestion
    assert found is not None
    assert not found.pays
    assert found.sentence.startswith("would gain nothing: dense is as fast")


def test_slow_selection_gains_nothing_either() -> None:
    """16 bits still do, if nothing else is said."""
    slow = SparseSpeeds(select_s_per_element=1e-6, merge_s_per_entry=0.0)
    found = choose(PROFILE, on(GBIT, 8, slow)).comparison.suggestion
    assert found is not None
    assert found.gain < 1
    assert not found.pays
    assert found.sentence.endswith("ask for it by compression='bfloat16' or 'int8'")


def test_speeds_that_are_not_known_are_said_to_be_left_out() -> None:
    found = suggestion(PROFILE, on(GBIT, 8, None), 1.0)
    assert found is not None
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
    assert suggestion(PROFILE, network, 1.0) is None


def test_a_line_without_a_link_has_one_inferred() -> None:
    line = Network.line(workers=8, a_s=1e-3, b_s_per_byte=14e-9)
    found = suggestion(PROFILE, line, 1.0)
    assert found is not None
    assert found.iteration_s < 0.3


@pytest.mark.parametrize("field", ["iteration_s", "dense_s"])
def test_an_impossible_time(field: str) -> None:
    made = Suggestion(
        algorithm="top-k", density=0.1, iteration_s=1.0, dense_s=2.0, selecting_counted=True
    )
    assert made.gain == 2
    with pytest.raises(ValueError, match=f"{field} must be finite and above 0"):
        msgspec.structs.replace(made, **{field: 0.0}).__post_init__()


def test_a_gpu_s_way_through_the_host_is_not_counted_and_said_so() -> None:
    """Compression takes gradients of a GPU, and nobody has measured how fast."""
    on_a_gpu = msgspec.structs.replace(PROFILE, device="cuda")
    for profile, said in ((PROFILE, False), (on_a_gpu, True)):
        for link in (GBIT, Link(alpha_s=1e-6, beta_s_per_byte=1e-12, gamma_s_per_byte=0.0)):
            found = suggestion(profile, on(link, 32), 2.0 if link is GBIT else 0.2)
            assert found is not None
            assert ("if copying through the host took no time" in found.sentence) == said
