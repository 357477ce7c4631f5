"""What every planner promises, and the table of them."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given

from syncline.errors import UserError
from syncline.model.network import Network
from syncline.model.profile import Profile
from syncline.planners import PLANNERS, planner_named
from tests import strategies as some

SIMPLE = [planner for name, planner in PLANNERS.items() if name != "auto"]


@some.many
@given(some.profiles(), some.networks())
def test_plans_cover_every_gradient_in_ready_order(profile: Profile, network: Network) -> None:
    for planner in SIMPLE:
        plan = planner.plan(profile, network)
        assert (plan.planner, plan.model) == (planner.NAME, profile.model)
        assert plan.workers == network.workers
        assert plan.difference(profile.gradients, network.workers) is None
        assert [t.name for t in plan.tensors] == [g.name for g in profile.gradients]
        assert plan.messages[0].start == 0
        assert plan.messages[-1].stop == sum(g.elements for g in profile.gradients)
        for before, after in itertools.pairwise(plan.messages):
            assert before.stop == after.start
        last = planner.last_tensors(profile, network)
        assert last == sorted(set(last))
        assert last[-1] == len(profile.gradients) - 1


@some.few
@given(some.layer_profiles(), some.integer_curves())
def test_planners_are_deterministic(profile: Profile, curve: some.IntegerCurve) -> None:
    network = curve.network()
    again = (Profile.from_json(profile.to_json()), Network.from_json(network.to_json()))
    for planner in PLANNERS.values():
        assert planner.plan(profile, network) == planner.plan(*again)


@some.few
@given(some.layer_profiles(), some.integer_curves())
def test_autos_cuts_are_those_of_its_plan(profile: Profile, curve: some.IntegerCurve) -> None:
    auto = PLANNERS["auto"]
    plan = auto.plan(profile, curve.network())
    cuts = auto.last_tensors(profile, curve.network())
    assert cuts == [tensors[-1] for tensors in plan.message_tensors()]


def test_the_table_has_every_planner_by_its_name() -> None:
    assert list(PLANNERS) == ["wfbp", "single", "ddp", "buckets", "mgwfbp", "merge", "auto"]
    for name, planner in PLANNERS.items():
        assert planner_named(name) is planner
        assert name == planner.NAME
        assert planner.SUMMARY


@pytest.mark.parametrize(
    ("name", "nearest"), [("mgwfpb", "mgwfbp"), ("merged", "merge"), ("bucket", "buckets")]
)
def test_an_unknown_planner_suggests_the_nearest(name: str, nearest: str) -> None:
    said = f"unknown planner {name!r}; did you mean {nearest!r}? (known: wfbp, single, "
    with pytest.raises(UserError, match=re.escape(said)):
        planner_named(name)


def test_a_name_like_no_other_suggests_nothing() -> None:
    with pytest.raises(UserError, match=re.escape("unknown planner 'zzz' (known: ")):
        planner_named("zzz")
