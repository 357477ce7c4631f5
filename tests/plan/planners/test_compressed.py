"""Plans of compressed messages."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.network import ENCODED_SEGMENT_BYTES, Link, Network
from syncline.plan.plan import Plan
from syncline.plan.planners.compressed import (
    choose_compressed,
    compressed,
    compressing,
    decoupled,
    planned_in,
)
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.overlap import Overlap
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Profile
from syncline.plan.recipe import Recipe, Rounded
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.messages import message_costs_ns
from syncline.plan.simulator.predict import communication_bound_s, predict
from syncline.plan.simulator.steady import steady_state
from syncline.plan.simulator.transformations import with_wire
from syncline.plan.sparse_costs import SparseSpeeds
from tests import strategies as some
from tests.plan.documents import plan_of
from tests.plan.planners.instances import spans


@st.composite
def small_profiles(draw: st.DrawFn) -> Profile:
    """Draw a profile of less than a gigabyte of float32."""
    drawn = draw(some.profiles())
    alike = tuple(msgspec.structs.replace(g, dtype="float32") for g in drawn.gradients)
    profile = msgspec.structs.replace(drawn, gradients=alike)
    assume(profile.gradient_bytes < 1e9)
    return profile


SLOW = Network.line(workers=4, a_s=1e-3, b_s_per_byte=1e-7, name="slow")
SPARSE = Recipe(density=0.01)
PROFILE = some.profile_of([1000, 1000, 1000, 1000], [50_000, 9_000, 70_000, 3])


@some.many
@given(some.plans(), st.booleans())
def test_any_plan_can_be_compressed(drawn: Plan, sparse: bool) -> None:
    tensors = tuple(msgspec.structs.replace(t, dtype="float32") for t in drawn.tensors)
    plan = msgspec.structs.replace(drawn, tensors=tensors)
    found = compressed(plan, SPARSE if sparse else "bfloat16")
    assert {m.payload for m in found.messages} == {"sparse" if sparse else "bfloat16"}
    if sparse:
        ends = {0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)}
        assert all({m.start, m.stop} <= ends for m in found.messages)
        assert found.in_flight == 1
    else:
        dense = tuple(msgspec.structs.replace(m, payload="dense") for m in found.messages)
        assert msgspec.structs.replace(found, messages=dense, planner=plan.planner) == plan
        assert [2 * size for size in found.message_bytes()] == list(plan.message_bytes())
    assert found.wait == plan.wait
    assert Plan.from_json(found.to_json()) == found
    assert compressed(found, SPARSE if sparse else "bfloat16") is found


def test_cuts_go_to_the_nearest_end_of_a_tensor_and_the_order_stays() -> None:
    cut = plan_of([10, 10, 10], (22, 30), (0, 8), (8, 22))
    assert spans(compressed(cut, SPARSE)) == [(20, 30), (0, 10), (10, 20)]
    inside = plan_of([10], (0, 3), (3, 10))
    assert spans(compressed(inside, SPARSE)) == [(0, 10)]


def test_decoupled_all_reduces_become_whole() -> None:
    plan = plan_of([8], (0, 8))
    parts = tuple(decoupled(plan.messages, at_once=True))
    found = compressed(msgspec.structs.replace(plan, messages=parts), SPARSE)
    assert [(m.collective, m.payload) for m in found.messages] == [("all-reduce", "sparse")]


def test_where_updates_need_a_norm_they_wait_for_everything() -> None:
    plan = msgspec.structs.replace(plan_of([3, 5], (0, 8)), wait="need", norm="2")
    made = compressed(plan, SPARSE)
    assert (made.wait, made.norm) == ("update", None)
    assert compressed(plan, "bfloat16").norm == "2"


def test_what_the_recipe_exchanges_whole_stays_dense_if_alone() -> None:
    recipe = Recipe(density=0.01, dense_names=("t1", "t2"))
    found = compressed(plan_of([9, 9, 9], (0, 9), (9, 27)), recipe)
    assert [m.payload for m in found.messages] == ["sparse", "dense"]
    assert found.is_lossy


def test_other_payloads_and_whole_models_are_refused() -> None:
    rounded = compressed(plan_of([9], (0, 9)), "float16")
    with pytest.raises(UserError, match="travel as float16, compression is gtop-k-butterfly"):
        compressed(rounded, SPARSE)
    with pytest.raises(UserError, match="unit 'model' selects from all gradients at once"):
        compressed(plan_of([4, 5], (0, 4), (4, 9)), Recipe(density=0.1, unit="model"))


def test_costs_when_compressed() -> None:
    size = 4_000_000
    dense_s = SLOW.all_reduce.seconds(size)
    assert compressing(SLOW, SPARSE).all_reduce.seconds(size) < dense_s / 10
    naive = compressing(SLOW, Recipe(density=0.01, algorithm="gtop-k-naive"))
    gathered = compressing(SLOW, Recipe(density=0.01, algorithm="top-k"))
    assert naive.all_reduce == gathered.all_reduce
    alone = Network.line(workers=1, a_s=0.0, b_s_per_byte=0.0)
    assert compressing(alone, SPARSE) is alone


def test_dense_messages_beside_sparse_ones_cost_what_dense_ones_do() -> None:
    recipe = Recipe(density=0.01, dense_names=("t1", "t2"))
    dense = plan_of([90_000] * 4, (0, 90_000), (90_000, 270_000), (270_000, 360_000))
    mixed = compressed(dense, recipe)
    assert [m.payload for m in mixed.messages] == ["sparse", "dense", "sparse"]
    costs = compressing(SLOW, recipe)
    found = message_costs_ns(costs, mixed)
    assert found[1] == message_costs_ns(SLOW, mixed)[1]
    assert found[1] > 10 * found[0]
    assert found[0] == round(costs.all_reduce.seconds(360_000) * 1e9)
    # A plan without compressed messages stands for one with them: planners know no payloads.
    plain = plan_of([90_000], (0, 90_000))
    assert message_costs_ns(costs, plain) == [found[0]]
    # So does the simulator of any other network, however it was made sparse.
    faster = SLOW.replace(algorithm="top-k", density=0.01, bandwidth_bytes_per_s=1e9)
    dense = SLOW.replace(bandwidth_bytes_per_s=1e9)
    assert message_costs_ns(faster, mixed)[1] == message_costs_ns(dense, mixed)[1]
    silent = msgspec.structs.replace(costs, whole=None)
    with pytest.raises(UserError, match="says what sparse messages cost, and the plan has dense"):
        message_costs_ns(silent, mixed)
    assert len(message_costs_ns(silent, plain)) == 1


def test_a_recipe_that_keeps_everything_dense_is_predicted_to_cost_that() -> None:
    recipe = Recipe(density=0.01, dense_names=("*",))
    choice = choose_compressed(PROFILE, SLOW, recipe, ddp=Ddp(), defers=False)
    assert not choice.plan.is_lossy
    own = choice.comparison.of(choice.plan.planner)
    assert own.iteration_s == predict(PROFILE, SLOW, choice.plan).prediction.iteration_s


def test_a_rounded_message_costs_its_bytes_on_the_wire_and_a_pass_over_its_elements() -> None:
    plan = plan_of([90_000], (0, 50_000), (50_000, 90_000))
    rounded = compressed(plan, "float16")
    assert rounded.message_bytes() == (100_000, 80_000)
    assert message_costs_ns(SLOW, rounded) == [
        round(SLOW.all_reduce.seconds(size) * 1e9) for size in (100_000, 80_000)
    ]
    link = Link(alpha_s=1e-3, beta_s_per_byte=1e-7, gamma_s_per_byte=1e-9)
    network = Network.of_link(link, workers=4)
    network = msgspec.structs.replace(network, pipelined=network.all_reduce)
    for in_flight in (1, 2):
        each = msgspec.structs.replace(rounded, in_flight=in_flight)
        sent_s = network.all_reduce.seconds(100_000)
        assert message_costs_ns(network, each)[0] == round((sent_s + 200_000e-9) * 1e9)


def test_shares_sent_directly_end_about_a_segment_apart() -> None:
    link = Link(alpha_s=1e-5, beta_s_per_byte=1e-9, gamma_s_per_byte=0.0)
    for workers, sizes in ((4, (1 << 12, 1 << 20, 1 << 24)), (2, (1 << 20,))):
        network = Network.of_link(link, workers=workers)
        cast = network.casting("int8")
        assert network.all_reduce is not None
        assert cast.all_reduce is not None
        for size in sizes:
            idle_bytes = min(size / workers, ENCODED_SEGMENT_BYTES) if workers > 2 else 0
            found_s = cast.all_reduce.seconds(size) - network.all_reduce.seconds(size)
            assert found_s == pytest.approx(idle_bytes * 1e-9)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@some.few
@given(small_profiles(), st.floats(0, 1e-2), st.floats(1e-12, 1e-7), st.floats(0, 1e-8))
def test_plans_made_for_a_wire_type_are_predicted_as_they_were_made(
    wire: Rounded, profile: Profile, alpha_s: float, beta: float, gamma: float
) -> None:
    """On the network as it is, and no sooner than their bound."""
    link = Link(alpha_s=alpha_s, beta_s_per_byte=beta, gamma_s_per_byte=gamma)
    network = Network.of_link(link, workers=4)
    narrow, cast = with_wire(profile, wire), network.casting(wire)
    for planner in (Wfbp(), Overlap()):
        plan = planned_in(planner, profile, network, wire)
        assert {m.payload for m in plan.messages} == {wire}
        found = predict(profile, network, plan).prediction
        dense = planner.plan(narrow, cast)
        orders = [dense.messages]
        if wire == "int8":
            orders = [tuple(decoupled(dense.messages, at_once=each)) for each in (False, True)]
        tried = [msgspec.structs.replace(dense, messages=each) for each in orders]
        predictions = [predict(narrow, cast, plan).prediction for plan in tried]
        made = min(predictions, key=lambda prediction: prediction.iteration_s)
        assert found.iteration_s == made.iteration_s
        assert found.lower_bound_s == pytest.approx(made.lower_bound_s, abs=1e-9)


def test_all_reduces_in_8_bits_are_decoupled() -> None:
    """Each gather follows the next sum; what was decoupled stays in its order."""
    plan = plan_of([10, 10, 10], (0, 10), (10, 30))
    summed, gathered = ("reduce-scatter", "all-gather")
    found = compressed(plan, "int8")
    in_turn = [(m.start, m.collective) for m in found.messages]
    assert in_turn == [(0, summed), (10, summed), (0, gathered), (10, gathered)]
    assert {m.payload for m in found.messages} == {"int8"}
    parts = tuple(msgspec.structs.replace(m, payload="dense") for m in found.messages)
    again = compressed(msgspec.structs.replace(plan, messages=parts), "int8")
    assert again.messages == found.messages
    assert compressed(found, "int8") == found
    at_once = [(m.start, m.collective) for m in decoupled(plan.messages, at_once=True)]
    assert at_once == [(0, summed), (0, gathered), (10, summed), (10, gathered)]
    gather = found.messages[2]
    parts = [msgspec.structs.replace(gather, start=a, stop=a + 5) for a in (0, 5)]
    messages = (*found.messages[:2], *parts, found.messages[3])
    with pytest.raises(UserError, match="travels as int8 and gathers a part of a reduce-scatter"):
        msgspec.structs.replace(plan, messages=messages)
    whole = tuple(msgspec.structs.replace(m, payload="int8") for m in plan.messages)
    with pytest.raises(UserError, match="travels as int8 and is an all-reduce, whose partial sums"):
        msgspec.structs.replace(plan, messages=whole)


@some.few
@given(st.data(), st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6), st.floats(1e-4, 1.0))
def test_no_mixed_plan_undercuts(data: st.DataObject, a_s: float, b: float, density: float) -> None:
    """Its bound, whichever of sparse and dense is dearer."""
    profile = data.draw(small_profiles())
    network = Network.line(workers=4, a_s=a_s, b_s_per_byte=b)
    names = tuple(g.name for g in profile.gradients if data.draw(st.booleans()))
    recipe = Recipe(density=density, dense_names=names)
    plan = compressed(Wfbp().plan(profile, network), recipe)
    costs = compressing(network, recipe)
    found = predict(profile, costs, plan)
    iteration_s = found.prediction.iteration_s
    scenario = Scenario(profile, costs)
    bound_s = communication_bound_s(scenario, plan, steady_state(scenario, plan))
    # The clock rounds each task to a nanosecond.
    assert bound_s <= iteration_s + 1e-9 * (len(plan.messages) + 2)


@pytest.mark.parametrize("defers", [True, False])
def test_the_fastest_compressed_plan_is_chosen(defers: bool) -> None:
    choice = choose_compressed(PROFILE, SLOW, SPARSE, ddp=Ddp(), defers=defers)
    predictions = choice.comparison.predictions
    assert any(p.planner.startswith("overlap+") for p in predictions) is defers
    assert predictions[-1].planner == "ddp"
    own = choice.comparison.of(choice.plan.planner)
    assert own.iteration_s == min(p.iteration_s for p in predictions[:-1])
    assert "ms" in choice.comparison.reason
    assert choice.plan.is_lossy
    assert defers or choice.plan.wait == "update"


def test_a_planner_that_was_asked_for_and_a_network_that_keeps_up() -> None:
    fast = Network.line(workers=4, a_s=0.0, b_s_per_byte=1e-15)
    choice = choose_compressed(PROFILE, fast, "bfloat16", planner=Wfbp(), ddp=Ddp(), defers=False)
    assert choice.plan.planner == "wfbp+bfloat16"
    assert choice.network is fast
    assert [p.planner for p in choice.comparison.predictions[1:]] == ["ddp+bfloat16", "ddp"]


def test_a_recipe_for_the_whole_model_makes_one_message() -> None:
    recipe = Recipe(density=0.01, unit="model")
    choice = choose_compressed(PROFILE, SLOW, recipe, ddp=Ddp(), defers=True)
    assert len(choice.plan.messages) == 1
    with pytest.raises(UserError, match="take the planner 'single'"):
        choose_compressed(PROFILE, SLOW, recipe, planner=Wfbp(), ddp=Ddp(), defers=True)


def test_measured_selecting_and_merging_is_counted() -> None:
    """In what messages cost, and so in the prediction; and nothing is suggested where it is on."""
    link = Link(alpha_s=1e-3, beta_s_per_byte=1e-7, gamma_s_per_byte=0.0)
    speeds = SparseSpeeds(select_s_per_element=1e-6, merge_s_per_entry=1e-6, message_s=2e-3)
    found = {}
    for known in (None, speeds):
        network = Network.of_link(link, workers=4, sparse=known)
        costs = compressing(network, SPARSE)
        choice = choose_compressed(PROFILE, network, SPARSE, ddp=Ddp(), defers=False)
        assert choice.comparison.suggestion is None
        assert choice.network == costs
        best = choice.comparison.of(choice.plan.planner)
        found[known is not None] = (costs.all_reduce.seconds(4_000_000), best.iteration_s)
    # A million elements are selected from, and some thousands merged.
    assert found[True][0] - found[False][0] > 1.0
    assert found[True][1] - found[False][1] > PROFILE.gradient_bytes / 4 * 1e-6 / 2
