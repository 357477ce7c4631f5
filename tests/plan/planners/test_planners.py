"""What every planner promises, and the table of them."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.planners import PLANNERS, Planner, planned, planner_named
from syncline.plan.planners.base import MergingPlanner
from syncline.plan.planners.horovod import Horovod
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.table import CANDIDATES, PUBLISHED, SCHEDULERS
from syncline.plan.profile import Profile
from tests import strategies as some


@some.many
@given(some.profiles(), some.networks())
def test_plans_cover_every_gradient_in_ready_order(profile: Profile, network: Network) -> None:
    for planner in CANDIDATES:
        plan = planner.plan(profile, network)
        assert (plan.planner, plan.model) == (planner.NAME, profile.model)
        assert plan.workers == network.workers
        assert plan.difference(profile.gradients, network.workers) is None
        assert [t.name for t in plan.tensors] == [g.name for g in profile.gradients]
        assert plan.messages[0].start == 0
        assert plan.messages[-1].stop == sum(g.elements for g in profile.gradients)
        for before, after in itertools.pairwise(plan.messages):
            assert before.stop == after.start
        assert isinstance(planner, MergingPlanner)
        last = planner.last_tensors(profile, network)
        assert last == sorted(set(last))
        assert last[-1] == len(profile.gradients) - 1


@some.few
@given(some.layer_profiles(), some.integer_curves(falls=True))
def test_planners_are_deterministic(profile: Profile, curve: some.IntegerCurve) -> None:
    network = curve.network()
    again = (Profile.from_json(profile.to_json()), Network.from_json(network.to_json()))
    for planner in PLANNERS.values():
        assert planner.plan(profile, network) == planner.plan(*again)


@some.many
@given(some.profiles(), some.networks())
def test_schedulers_plan_whatever_is_not_cut_into_too_many(
    profile: Profile, network: Network
) -> None:
    for planner in SCHEDULERS:
        try:
            plan = planner.plan(profile, network)
        except UserError as error:
            assert planner.NAME in ("p3", "bytescheduler")
            assert "at most 131072 can be planned" in str(error)  # noqa: PT017
            continue
        assert plan.planner == planner.NAME
        assert plan.difference(profile.gradients, network.workers) is None
        assert plan.wait == ("update" if planner.NAME == "horovod" else "need")


def test_the_tables_are_disjoint() -> None:
    names = [planner.NAME for planner in PUBLISHED]
    assert len(set(names)) == len(names) == len(CANDIDATES) + len(SCHEDULERS)
    assert set(PLANNERS) == set(names) | {"overlap", "auto"}


@pytest.mark.parametrize("planner", CANDIDATES, ids=lambda p: p.NAME)
def test_candidates_need_no_more_than_the_buckets_of_a_reducer(planner: Planner) -> None:
    profile = some.profile_of([5, 5, 5], [1, 2, 3])
    plan = planner.plan(profile, Network.line(workers=4, a_s=1e-9, b_s_per_byte=1e-9))
    assert (plan.wait, plan.in_flight) == ("update", 1)
    assert all(m.collective == "all-reduce" and m.delay_s == 0 for m in plan.messages)


def test_the_table_has_every_planner_by_its_name() -> None:
    names = [planner.NAME for planner in PUBLISHED]
    assert names[:6] == ["wfbp", "single", "ddp", "buckets", "mgwfbp", "merge"]
    assert names[6:] == ["horovod", "dear", "tictac", "p3", "bytescheduler", "pace"]
    assert list(PLANNERS)[: len(names)] == names
    assert list(PLANNERS)[-1] == "auto"
    for name, planner in PLANNERS.items():
        assert planner_named(name) is planner
        assert name == planner.NAME


@pytest.mark.parametrize(
    ("name", "nearest"), [("mgwfpb", "mgwfbp"), ("merged", "merge"), ("bucket", "buckets")]
)
def test_an_unknown_planner_suggests_the_nearest(name: str, nearest: str) -> None:
    said = f"unknown planner {name!r}; did you mean {nearest!r}? (known: wfbp, single, "
    with pytest.raises(UserError, match=re.escape(said)):
        planner_named(name)


def test_settings_follow_the_name() -> None:
    assert planner_named("horovod:cycle_s=0.005:threshold_bytes=67108864") == Horovod(
        cycle_s=0.005, threshold_bytes=64 << 20
    )
    assert planner_named("p3:slice_elements=1000") == P3(slice_elements=1000)


def test_a_plan_has_the_name_with_its_settings() -> None:
    """So that two forms of one planner stand side by side in a comparison."""
    profile = some.profile_of([5, 5, 5], [25, 25, 25])
    network = Network.line(workers=4, a_s=1e-9, b_s_per_byte=1e-9)
    found = planned("buckets:threshold_bytes=100", profile, network)
    assert (found.planner, len(found.messages)) == ("buckets:threshold_bytes=100", 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("horovod:cycle=1", "setting of planner horovod 'cycle'; did you mean 'cycle_s'?"),
        ("horovod:cycle_s", "horovod: cycle_s is a number, as in horovod:cycle_s=0.001; found ''"),
        (
            "p3:slice_elements=1.5",
            "slice_elements is a whole number, as in p3:slice_elements=40000",
        ),
        ("p3:slice_elements=0", "p3: slice_elements must be at least 1, found 0"),
        ("merge:x=1", "planner merge has no settings, found 'x=1'"),
        ("auto:x=1", "planner auto has no settings"),
        ("horovd:cycle_s=1", "did you mean 'horovod'?"),
    ],
)
def test_settings_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        planner_named(text)


def test_a_name_like_no_other_suggests_nothing() -> None:
    with pytest.raises(UserError, match=re.escape("unknown planner 'zzz' (known: ")):
        planner_named("zzz")
