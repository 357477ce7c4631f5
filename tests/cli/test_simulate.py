"""``syncline plan`` and ``syncline simulate``: files in, plans, predictions and timelines out."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.auto import choose
from syncline.plan.planners.compressed import compressed, planned_in
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.merge import Merge
from syncline.plan.planners.overlap import candidates
from syncline.plan.prediction import Comparison
from syncline.plan.recipe import Recipe
from syncline.plan.simulator.predict import predict
from syncline.plan.timeline import Timeline
from tests import strategies as some
from tests.cli.examples import K80, LINKED, PROFILE, Printed, Run
from tests.plan.planners.instances import iteration_s

Compared = Callable[..., Comparison]


@pytest.fixture
def compare(printed: Printed, profile: Path) -> Compared:
    """Return a call that simulates the profile on a network, and returns what it finds."""
    return lambda network, *options: Comparison.from_json(
        printed("simulate", profile, network, *options, "--json")
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_what_training_chooses_from(printed: Printed, profile: Path, overlap: bool) -> None:
    asked = ("simulate", profile, "10gbe-k80", "--overlap" if overlap else "--no-overlap")
    names = [planner.NAME for planner in candidates(defers=overlap)]
    listed = {word for line in printed(*asked).splitlines() for word in line.split()[:2]}
    assert set(names) <= listed
    assert ("overlap" in listed) is overlap
    made = json.loads(printed(*asked, "--bandwidth", "1gbit", "--json"))
    assert [p["planner"] for p in made["points"][0]["predictions"]] == names


def test_without_overlap_updates_wait_for_all_messages(compare: Compared, tmp_path: Path) -> None:
    plan = PLANNERS["p3"].plan(PROFILE, K80)
    plan.save(path := tmp_path / "plan.json")
    for source in (("--planner", "p3"), ("--plan", path)):
        (prediction,) = compare("10gbe-k80", *source, "--no-overlap").predictions
        assert prediction == predict(PROFILE, K80, plan.waiting_for_all()).prediction


def test_sharding(compare: Compared, printed: Printed, profile: Path, tmp_path: Path) -> None:
    """DDP gathers parameters after them, overlap under the next forward pass."""
    printed("plan", profile, "1gbit", "--shard", "--planner", "overlap", "-o", tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").sharded
    asked = ("1gbit", "--planner", "ddp,overlap")
    whole, sharded = (compare(*asked, *shard) for shard in ((), ("--shard",)))
    assert sharded.of("ddp").iteration_s > whole.of("ddp").iteration_s
    assert sharded.of("overlap").iteration_s < sharded.of("ddp").iteration_s
    assert printed("simulate", profile, "1gbit", "--shard", "--workers", "4,8")
    to = ("--latency", "20us", "--timeline", tmp_path / "timeline")
    printed("simulate", profile, "1gbit", "--shard", "--planner", "ddp", *to)
    labels = [span.label for span in Timeline.load(tmp_path / "timeline").spans]
    assert labels.count("gather parameters") == 1


@pytest.mark.parametrize(
    ("planners", "reason"),
    [("wfbp", "wfbp was asked for"), ("wfbp, merge", "the fastest of those that were asked for")],
)
def test_some_planners(compare: Compared, planners: str, reason: str) -> None:
    found, names = compare("10gbe-k80", "--planner", planners), planners.split(", ")
    plans = [PLANNERS[name].plan(PROFILE, K80) for name in names]
    assert found.predictions == tuple(predict(PROFILE, K80, p).prediction for p in plans)
    assert (found.chosen, found.reason) == (names[-1], reason)


def test_all_planners_or_those_that_training_chooses_from(compare: Compared) -> None:
    every = compare("10gbe-k80", "--planner", "all")
    assert [p.planner for p in every.predictions] == [n for n in PLANNERS if n != "auto"]
    fastest_s = min(p.iteration_s for p in every.predictions)
    assert every.of(every.chosen).iteration_s == fastest_s
    for planner in ((), ("--planner", "auto")):
        assert compare("10gbe-k80", *planner) == choose(PROFILE, K80).comparison


def test_a_sparse_plan_does_not_cost_what_dense_messages_do(
    printed: Printed, refused: Printed, profile: Path, network: Path, tmp_path: Path
) -> None:
    plan = compressed(PLANNERS["merge"].plan(PROFILE, LINKED), Recipe(density=0.001))
    plan.save(path := tmp_path / "plan.json")
    asked = ("simulate", profile, network, "--plan", path)
    assert "the plan's messages are sparse, and the network says what dense" in refused(*asked)
    assert printed(*asked, "--algorithm", "gtop-k", "--density", "0.001")


def test_16_bits_cost_what_is_sent(compare: Compared, network: Path, tmp_path: Path) -> None:
    plan = planned_in(PLANNERS["merge"], PROFILE, LINKED, "bfloat16")
    plan.save(path := tmp_path / "plan.json")
    comparison = compare(network, "--plan", path)
    assert comparison.reason == f"the plan in {path}"
    (found,) = comparison.predictions
    assert found == predict(PROFILE, LINKED, plan).prediction
    messages = tuple(msgspec.structs.replace(m, payload="dense") for m in plan.messages)
    dense = predict(PROFILE, LINKED, msgspec.structs.replace(plan, messages=messages)).prediction
    assert 0 < found.communication_s < dense.communication_s


@pytest.mark.parametrize("planner", ["auto", "ddp"])
def test_the_timeline(printed: Printed, profile: Path, tmp_path: Path, planner: str) -> None:
    path = tmp_path / "timeline.json"
    arguments = ("simulate", profile, "10gbe-k80", "--planner", planner, "--timeline", path)
    out = printed(*arguments)
    timeline = Timeline.load(path)
    assert f"timeline of {timeline.name} written to {path}" in out
    name = choose(PROFILE, K80).comparison.chosen if planner == "auto" else planner
    assert timeline == predict(PROFILE, K80, PLANNERS[name].plan(PROFILE, K80)).timeline
    assert Comparison.from_json(printed(*arguments, "--json")).chosen == name


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("bandwidth=1mbit,workers=8", "bfloat16 would take"),
        ("bandwidth=1000gbit,latency=0us,workers=8", "would gain nothing: dense is as fast"),
    ],
)
def test_what_compression_would_gain(printed: Printed, profile: Path, link: str, said: str) -> None:
    assert f"compression: {said}" in " ".join(printed("simulate", profile, link).split())


def test_a_plan_is_shown(printed: Printed, profile: Path) -> None:
    out = printed("plan", profile, "10gbe-k80", "--planner", "merge")
    assert "merge" in out
    ddp_s, merge_s = (iteration_s(PROFILE, K80, planner) for planner in (Ddp(), Merge()))
    assert out.splitlines()[-1].endswith(f": {ddp_s / merge_s:.2f} times as fast")


def test_sparse_exchange_is_not_compared_with_ddp(printed: Printed, profile: Path) -> None:
    sparse = "bandwidth=10gbit,workers=4,algorithm=top-k,density=0.001"
    assert "times as fast" not in printed("plan", profile, sparse)


@pytest.mark.parametrize("planner", PLANNERS)
def test_json_is_all_that_is_printed(printed: Printed, profile: Path, planner: str) -> None:
    out = printed("plan", profile, "10gbe-k80", "--planner", planner, "--json")
    assert Plan.from_json(out) == PLANNERS[planner].plan(PROFILE, K80)


def test_the_plan_is_written(printed: Printed, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert f"plan written to {path}" in printed("plan", profile, "10gbe-k80", "-o", path)
    assert Plan.load(path) == PLANNERS["auto"].plan(PROFILE, K80)
    assert printed("plan", profile, "10gbe-k80", "-o", path, "--json") == path.read_text()


def test_a_profile_comes_through_a_pipe(printed: Printed, profile: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = threading.Thread(target=lambda: pipe.write_bytes(profile.read_bytes()))
    writer.start()
    assert printed("simulate", pipe, "10gbit") == printed("simulate", profile, "10gbit")
    writer.join()


def test_auto_considers_overlap_as_training_does(printed: Printed, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    some.profile_of([10_000_000] * 8, [250_000] * 8, forward_ns=50_000_000).save(path)
    asked = ("plan", path, "a=1e-5,b=1e-8,workers=4", "--json")
    assert Plan.from_json(printed(*asked)).planner == "overlap"
    held = Plan.from_json(printed(*asked, "--no-overlap"))
    assert held.planner != "overlap"
    assert held.wait == "update"
    p3 = Plan.from_json(printed(*asked, "--planner", "p3", "--no-overlap"))
    assert p3.wait == "update"


def test_other_workers_and_algorithms(printed: Printed, profile: Path, network: Path) -> None:
    assert Plan.from_json(printed("plan", profile, network, "--json")).workers == 16
    short, full = (
        printed("plan", profile, network, "--workers", 64, "--algorithm", name, "--json")
        for name in ("double-tree", "double-binary-trees")
    )
    assert short == full
    assert Plan.from_json(short).workers == 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plann", "no such command 'plann'; did you mean 'plan'?"),
        ("plan", "Missing argument 'PROFILE'"),
        ("plan --planner", "--planner"),
        ("plan --colour red", "--colour"),
        ("emulate", "Missing argument 'COMMAND...'"),
        ("help trian", "did you mean 'train'?"),
    ],
)
def test_wrong_usage(run: Run, arguments: str, said: str) -> None:
    result = run(*arguments.split())
    assert (result.code, result.out) == (2, "")
    assert "Error: " in result.err
    assert said in result.err
