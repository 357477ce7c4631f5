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
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.horovod import Horovod
from syncline.plan.planners.p3 import P3
from syncline.plan.planners.table import CANDIDATES, PUBLISHED, SCHEDULERS
from syncline.plan.profile import Profile
from syncline.plan.simulator.transformations import with_wire
from tests import strategies as some
from tests.plan.planners.instances import spans


@some.many
@given(some.profiles(), some.networks())
def test_plans_cover_every_gradient_in_ready_order(profile: Profile, network: Network) -> None:
    profile = with_wire(profile, "complex64")  # all of one dtype
    for planner in CANDIDATES:
        plan = planner.plan(profile, network)
        assert (plan.planner, plan.model) == (planner.NAME, profile.model)
        assert plan.workers == network.workers
        assert plan.difference(profile.gradients, network.workers) is None
        assert [t.name for t in plan.tensors] == [g.name for g in profile.gradients]
        assert spans(plan) == list(itertools.pairwise([0, *(m.stop for m in plan.messages)]))
        assert isinstance(planner, MergingPlanner | Ddp)
        if isinstance(planner, MergingPlanner):
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


@some.costly
@given(some.profiles(), some.networks())
def test_schedulers_plan_what_is_not_cut_into_too_many(profile: Profile, network: Network) -> None:
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
    assert list(PLANNERS) == [*names, "overlap", "auto"]
    for name, planner in PLANNERS.items():
        assert planner_named(name) is planner
        assert name == planner.NAME


def test_settings_follow_the_name() -> None:
    found = planner_named("horovod:cycle_s=0.005:threshold_bytes=67108864")
    assert found == Horovod(cycle_s=0.005, threshold_bytes=64 << 20)
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
        ("p3:slice_elements=1.5", "is a whole number, as in p3:slice_elements=40000"),
        ("p3:slice_elements=0", "p3: slice_elements must be at least 1, found 0"),
        ("buckets:threshold_bytes=-1", "threshold_bytes must be at least 0, found -1"),
        ("bytescheduler:partition_elements=0", "partition_elements must be at least 1, found 0"),
        ("bytescheduler:credit_elements=-1", "credit_elements must be at least 1, found -1"),
        ("bytescheduler:partition_elements=2:credit_elements=129", "for 65 partitions of 2; at"),
        ("dear:bucket_bytes=-1", "dear: bucket_bytes must be at least 0, found -1"),
        ("horovod:cycle_s=-1", "horovod: cycle_s must be a finite time"),
        ("horovod:cycle_s=1e-10", "must be 0 or at least a nanosecond, found 1e-10"),
        ("horovod:threshold_bytes=-1", "threshold_bytes must be at least 0, found -1"),
        ("overlap:in_flight=0", "overlap: in_flight must be 1 or 2, found 0"),
        ("overlap:in_flight=3", "overlap: in_flight must be 1 or 2, found 3"),
        ("overlap:budget=-1", "overlap: budget must be at least 0, found -1"),
        ("merge:x=1", "planner merge has no settings, found 'x=1'"),
        ("auto:x=1", "planner auto has no settings"),
        ("horovd:cycle_s=1", "did you mean 'horovod'?"),
        ("mgwfpb", "unknown planner 'mgwfpb'; did you mean 'mgwfbp'? (known: wfbp, single, "),
        ("merged", "did you mean 'merge'?"),
        ("bucket", "did you mean 'buckets'?"),
        ("zzz", "unknown planner 'zzz' (known: "),
    ],
)
def test_what_names_no_planner(text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        planner_named(text)
