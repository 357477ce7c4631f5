"""``syncline simulate``: the table of predictions, a plan of one's own, the timeline."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from syncline.plan.network import PRESETS
from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.auto import choose
from syncline.plan.planners.compressed import compressed, planned_in
from syncline.plan.planners.overlap import candidates
from syncline.plan.prediction import Comparison
from syncline.plan.recipe import Recipe
from syncline.plan.simulator.predict import predict
from syncline.plan.timeline import Timeline
from tests.cli.test_plan import LINKED, PROFILE, Run, network, profile, run

__all__ = ["network", "profile", "run"]  # fixtures

K80 = PRESETS["10gbe-k80"]


def test_what_training_chooses_from_is_compared(run: Run, profile: Path) -> None:
    for options, overlap in (((), True), (("--no-overlap",), False)):
        result = run("simulate", profile, "10gbe-k80", *options)
        assert (result.code, result.err) == (0, "")
        listed = {word for line in result.out.splitlines() for word in line.split()[:2]}
        assert {planner.NAME for planner in candidates(defers=overlap)} <= listed
        assert ("overlap" in listed) is overlap
        made = run("simulate", profile, "10gbe-k80", *options, "--bandwidth", "1gbit", "--json")
        names = [p["planner"] for p in json.loads(made.out)["points"][0]["predictions"]]
        assert names == [planner.NAME for planner in candidates(defers=overlap)]


def test_without_overlap_messages_end_with_the_backward_pass(
    run: Run, profile: Path, tmp_path: Path
) -> None:
    held = PLANNERS["p3"].plan(PROFILE, K80).waiting_for_all()
    path = tmp_path / "plan.json"
    PLANNERS["p3"].plan(PROFILE, K80).save(path)
    for source in (("--planner", "p3"), ("--plan", path)):
        result = run("simulate", profile, "10gbe-k80", *source, "--no-overlap", "--json")
        (prediction,) = Comparison.from_json(result.out).predictions
        assert prediction == predict(PROFILE, K80, held).prediction


def test_sharded_updates(run: Run, profile: Path, tmp_path: Path) -> None:
    """DDP gathers parameters after them, overlap under the next forward pass."""
    place = tmp_path / "plan.json"
    result = run("plan", profile, "1gbit", "--shard", "--planner", "overlap", "-o", place)
    assert result.code == 0, result.err
    assert Plan.load(place).sharded
    planners = ("--planner", "ddp,overlap", "--json")
    whole, sharded = (
        {p.planner: p.iteration_s for p in Comparison.from_json(run(*asked).out).predictions}
        for asked in (
            ("simulate", profile, "1gbit", *planners),
            ("simulate", profile, "1gbit", *planners, "--shard"),
        )
    )
    assert sharded["ddp"] > whole["ddp"]
    assert sharded["overlap"] < sharded["ddp"]
    result = run("simulate", profile, "1gbit", "--shard", "--workers", "4,8")
    assert result.code == 0, result.err
    result = run("simulate", profile, "1gbit", "--shard", "--density", "0.001")
    assert result.code == 2
    assert "--shard" in result.err


def test_all_planners_are_compared(run: Run, profile: Path) -> None:
    result = run("simulate", profile, "10gbe-k80", "--planner", "all", "--json")
    comparison = Comparison.from_json(result.out)
    assert [p.planner for p in comparison.predictions] == [n for n in PLANNERS if n != "auto"]
    fastest = min(p.iteration_s for p in comparison.predictions)
    assert comparison.of(comparison.chosen).iteration_s == fastest


@pytest.mark.parametrize("planner", [(), ("--planner", "auto")])
def test_json_is_all_that_is_printed(run: Run, profile: Path, planner: tuple[str, ...]) -> None:
    result = run("simulate", profile, "10gbe-k80", "--json", *planner)
    assert result.code == 0
    assert json.loads(result.out)["format"] == "syncline/comparison"
    assert Comparison.from_json(result.out) == choose(PROFILE, K80).comparison


@pytest.mark.parametrize("planner", ["wfbp", "merge"])
def test_one_planner(run: Run, profile: Path, planner: str) -> None:
    result = run("simulate", profile, "10gbe-k80", "--planner", planner, "--json")
    comparison = Comparison.from_json(result.out)
    plan = PLANNERS[planner].plan(PROFILE, K80)
    assert comparison.predictions == (predict(PROFILE, K80, plan).prediction,)
    assert comparison.chosen == planner
    assert comparison.reason == f"{planner} was asked for"


def test_some_planners(run: Run, profile: Path) -> None:
    result = run("simulate", profile, "10gbe-k80", "--planner", "wfbp, merge", "--json")
    comparison = Comparison.from_json(result.out)
    assert [p.planner for p in comparison.predictions] == ["wfbp", "merge"]
    assert (comparison.chosen, comparison.reason) == (
        "merge",
        "the fastest of those that were asked for",
    )


def test_a_plan_of_ones_own(run: Run, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run("plan", profile, "10gbe-k80", "--planner", "single", "-o", path).code == 0
    result = run("simulate", profile, "10gbe-k80", "--plan", path, "--json")
    comparison = Comparison.from_json(result.out)
    assert comparison.of("single").messages == 1
    assert comparison.reason == f"the plan in {path}"


def test_a_sparse_plan_is_not_simulated_at_what_dense_messages_cost(
    run: Run, profile: Path, network: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    compressed(PLANNERS["merge"].plan(PROFILE, LINKED), Recipe(density=0.001)).save(path)
    result = run("simulate", profile, network, "--plan", path)
    assert (result.code, result.out) == (2, "")
    assert "the plan's messages are sparse, and the network says what dense" in result.err
    sparse = ("--algorithm", "gtop-k", "--density", "0.001")
    assert run("simulate", profile, network, "--plan", path, *sparse).code == 0


def test_a_plan_of_16_bits_is_simulated_at_its_bytes_on_the_wire(
    run: Run, profile: Path, network: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    plan = planned_in(PLANNERS["merge"], PROFILE, LINKED, "bfloat16")
    plan.save(path)
    result = run("simulate", profile, network, "--plan", path, "--json")
    (found,) = Comparison.from_json(result.out).predictions
    assert found == predict(PROFILE, LINKED, plan).prediction
    messages = tuple(msgspec.structs.replace(m, payload="dense") for m in plan.messages)
    dense = predict(PROFILE, LINKED, msgspec.structs.replace(plan, messages=messages)).prediction
    assert 0 < found.communication_s < dense.communication_s


def test_a_plan_and_a_planner(run: Run, profile: Path, tmp_path: Path) -> None:
    for planner in ("merge", "auto"):
        result = run("simulate", profile, "10gbe-k80", "--plan", "x", "--planner", planner)
        assert (result.code, result.out) == (2, "")
        assert "give either --planner or --plan, not both" in result.err


def test_a_plan_for_other_workers(run: Run, profile: Path, network: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLANNERS["merge"].plan(PROFILE, LINKED).save(path)
    result = run("simulate", profile, network, "--plan", path, "--workers", 64)
    assert (result.code, result.out) == (2, "")
    assert "the plan is for 16 workers, this job has 64" in result.err


def test_a_plan_for_another_model(run: Run, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = PLANNERS["merge"].plan(PROFILE, K80)
    text = plan.to_json().replace('"g0"', '"other"')
    Plan.from_json(text).save(path)
    result = run("simulate", profile, "10gbe-k80", "--plan", path)
    assert result.code == 2
    assert "no gradient 'g0', this model does" in result.err


@pytest.mark.parametrize("planner", ["auto", "ddp"])
def test_the_timeline_is_written(run: Run, profile: Path, tmp_path: Path, planner: str) -> None:
    path = tmp_path / "timeline.json"
    arguments = ("simulate", profile, "10gbe-k80", "--planner", planner, "--timeline", path)
    result = run(*arguments)
    assert result.code == 0
    timeline = Timeline.load(path)
    assert f"timeline of {timeline.name} written to {path}" in result.out
    name = choose(PROFILE, K80).comparison.chosen if planner == "auto" else planner
    assert timeline == predict(PROFILE, K80, PLANNERS[name].plan(PROFILE, K80)).timeline
    assert Comparison.from_json(run(*arguments, "--json").out).chosen == name


def test_more_workers(run: Run, profile: Path, network: Path) -> None:
    result = run("simulate", profile, network, "--workers", 1024, "--json")
    comparison = Comparison.from_json(result.out)
    assert (comparison.workers, comparison.network) == (1024, "lan at 1024 workers (ring)")
    result = run("simulate", profile, "10gbe-k80", "--workers", 1024, "--json")
    name = "10gbe-k80 at 1024 workers (ring, link inferred by ring)"
    assert Comparison.from_json(result.out).network == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--planner", "mgwfb"), "did you mean 'mgwfbp'?"),
        (("--planner", "ddp,all"), "--planner all stands alone"),
        (("--planner", "ddp,ddp"), "--planner names 'ddp' twice"),
        (("--plan", "absent.json"), "absent.json: no such file"),
        (("--timeline", "absent/timeline.json"), "cannot be written"),
    ],
)
def test_mistakes(run: Run, profile: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("simulate", profile, "10gbe-k80", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert message in result.err


def test_a_network_slower_than_can_be_simulated(run: Run, profile: Path) -> None:
    result = run("simulate", profile, "a=1e6,b=1e6")
    assert (result.code, result.out) == (2, "")
    assert "the messages of one iteration take longer than" in result.err


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("bandwidth=1mbit,workers=8", "bfloat16 would take"),
        ("bandwidth=1000gbit,latency=0us,workers=8", "would gain nothing: dense is as fast"),
    ],
)
def test_what_compression_would_gain_is_said(run: Run, profile: Path, link: str, said: str) -> None:
    result = run("simulate", profile, link)
    assert result.code == 0
    assert f"compression: {said}" in " ".join(result.out.split())
