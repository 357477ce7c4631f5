"""Messages of one dtype each."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.compressed import compressed, planned_in
from syncline.plan.planners.dtypes import apart
from syncline.plan.planners.merge import Merge
from syncline.plan.planners.overlap import Overlap
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.tictac import TicTac
from syncline.plan.planners.wfbp import Single, Wfbp
from syncline.plan.profile import Profile
from syncline.plan.recipe import Recipe, Rounded
from syncline.plan.simulator.predict import predict_iteration_s
from tests import strategies as some
from tests.plan.planners.instances import chain, spans

NETWORK = Network.line(workers=4, a_s=1e-3, b_s_per_byte=4e-8)


def transformer(blocks: int = 8, *, norm: bool = False) -> Profile:
    """Return a profile of weights in bfloat16, each with a norm in float32."""
    elements, dtypes = [500_000, 2_000] * blocks, ["bfloat16", "float32"] * blocks
    made = chain([0.01] * len(elements), elements, [0.004] * len(elements), dtypes)
    return msgspec.structs.replace(made, norm="2") if norm else made


def require_one_dtype_each(plan: Plan, profile: Profile) -> None:
    for tensors in plan.message_tensors():
        assert len({plan.tensors[t].dtype for t in tensors if plan.tensors[t].elements}) <= 1
    for dtype in {gradient.dtype for gradient in profile.gradients}:
        ours = [t.name for t in plan.tensors if t.dtype == dtype]
        assert ours == [g.name for g in profile.gradients if g.dtype == dtype]


@some.costly
@given(some.profiles(most_elements=1 << 20), some.networks(), st.booleans(), st.booleans())
def test_every_planner_sends_one_dtype_a_message(
    profile: Profile, network: Network, norm: bool, sharded: bool
) -> None:
    profile = msgspec.structs.replace(profile, norm="2" if norm else None, sharded=sharded)
    for planner in PLANNERS.values():
        plan = planner.plan(profile, network)
        require_one_dtype_each(plan, profile)
        assert plan.difference(profile.gradients, network.workers) is None
        assert apart(plan) == plan


def test_a_message_is_cut_where_the_dtype_changes() -> None:
    profile = chain([1] * 4, [4, 2, 6, 3], [0] * 4, ["float32", "bfloat16"] * 2)
    whole = Plan.merging("by hand", profile, 2, [3])
    cut = msgspec.structs.replace(
        whole, messages=tuple(Message(start=a, stop=b) for a, b in [(9, 15), (0, 5), (5, 9)])
    )
    found = apart(cut)
    assert [t.name for t in found.tensors] == ["g3", "g1", "g2", "g0"]
    # Of both tensors of each dtype; of the first two; of the second and the third.
    assert spans(found) == [(7, 10), (12, 15), (0, 4), (10, 11), (11, 12), (4, 7)]
    assert apart(found) == found
    assert apart(whole).message_bytes() == (40, 10)


def test_small_pieces_are_joined_if_that_is_faster() -> None:
    profile = transformer()
    plan = Merge().plan(profile, NETWORK)
    kinds = [{plan.tensors[t].dtype for t in tensors} for tensors in plan.message_tensors()]
    assert kinds.count({"float32"}) < kinds.count({"bfloat16"})
    plain = apart(Merge()._arrange(profile, NETWORK))
    assert predict_iteration_s(profile, NETWORK, plan) < predict_iteration_s(
        profile, NETWORK, plain
    )


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_only_float32_is_rounded(wire: Rounded, norm: bool) -> None:
    profile = transformer(norm=norm)
    plan = planned_in(Overlap(), profile, NETWORK, wire)
    require_one_dtype_each(plan, profile)
    for message, tensors in zip(plan.messages, plan.message_tensors(), strict=True):
        (dtype,) = {plan.tensors[t].dtype for t in tensors}
        assert message.payload == (wire if dtype == "float32" else "dense")
    assert Plan.from_json(plan.to_json()) == plan


@some.few
@given(some.profiles(most_elements=1 << 20), st.sampled_from(["bfloat16", "int8"]))
def test_any_profile_can_be_planned_in_fewer_bits(profile: Profile, wire: Rounded) -> None:
    planned_in(Merge(), profile, NETWORK, wire)


def test_messages_of_one_dtype_stay_as_published() -> None:
    profile = transformer()
    for planner in (P3(), TicTac(), Wfbp()):
        assert planner.plan(profile, NETWORK) == apart(planner._arrange(profile, NETWORK))


def test_only_float32_is_sent_sparsely() -> None:
    profile = transformer(2)
    plan = compressed(Single().plan(profile, NETWORK), Recipe(density=0.01, unit="model"))
    assert [m.payload for m in plan.messages] == ["dense", "sparse"]


def test_pieces_of_sums_are_gathered_whole() -> None:
    """In 8 bits a gather of a part would round the sum's blocks anew."""
    profile = transformer(norm=True)
    plan = Overlap().plan(profile, NETWORK)
    bounds = {b for m in plan.messages if m.collective != "all-gather" for b in (m.start, m.stop)}
    assert all({m.start, m.stop} <= bounds for m in plan.messages)
