"""DistributedDataParallel through real process groups."""

from __future__ import annotations

import inspect

import msgspec
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.cli.commands import cli
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.prediction import Comparison
from syncline.plan.profile import Profile
from syncline.torch_private import DDP_ARGUMENTS
from syncline.train.experiments import DEFERRED
from syncline.train.requirements import COMPARED_ARGUMENTS, why_not_compiled
from syncline.train.stage_runner import SYNCS_CERTAIN_AFTER
from tests.cases import first_few
from tests.train import jobs
from tests.train.test_buckets import FEATURES
from tests.workers import WorkerPool


@pytest.mark.parametrize("optimizer", first_few(["sgd", "adam", "adamw"]))
@pytest.mark.parametrize("model", ["plain", "shared"])
def test_bits_agree_with_stock_ddp(workers: WorkerPool, model: str, optimizer: str) -> None:
    for result in workers.run(jobs.compare_with_stock, 2, model, optimizer, {"planner": "wfbp"}):
        assert result["differences"] == []
        assert result["decision"] == "planned", result["reason"]
        # Only this model has more than twice as many messages under the plan as under DDP.
        calibrated = ["calibrating with 12 equal parts"] if model == "shared" else []
        tried = [*calibrated, "trying wfbp"]
        assert result["phases"] == ["measuring DDP", "profiling", *tried, "recording", "steady"]
        # On a GPU the host waits once a stage: waiting in every iteration would change their times.
        assert result["settled"].count("profiling") == 1


@pytest.mark.parametrize(
    "options",
    first_few(
        [
            {"planner": "auto"},
            {"accumulate": 3, "planner": "wfbp"},
            {"bf16": True, "planner": "wfbp"},
            {"planner": "merge", "ddp": {"gradient_as_bucket_view": True}},
            {"planner": "wfbp", "ddp": {"static_graph": True}},
            {"planner": "wfbp", "ddp": {"bucket_cap_mb": 1}},
        ],
        2,
    ),
    ids=str,
)
def test_bits_agree_under_options(workers: WorkerPool, options: dict[str, object]) -> None:
    for result in workers.run(jobs.compare_with_stock, 2, "plain", "sgd", options):
        assert result["differences"] == []
        assert result["phases"][-1] == "steady"
        # Parameters are first read in the first of several micro-batches.
        assert len(result["accumulating"]) == ("accumulate" in options)
        for accumulating in result["accumulating"]:
            assert max(result["needed_by"]) < accumulating


@pytest.mark.parametrize("view", first_few([True, False]))
def test_bits_agree_with_unused_parameters(workers: WorkerPool, view: bool) -> None:
    options = {
        "planner": "wfbp",
        "ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": view},
    }
    for result in workers.run(jobs.compare_with_stock, 2, "unused", "adam", options):
        assert result["differences"] == []
        assert result["decision"] == "planned", result["reason"]


@pytest.mark.parametrize(
    ("model", "arguments"),
    first_few(
        [
            ("shared", {}),
            ("unused", {"find_unused_parameters": True}),
            ("plain", {}),
            ("plain", {"find_unused_parameters": True}),
            ("plain", {"static_graph": True}),
        ],
        2,
    ),
)
def test_buckets_are_exactly_the_messages(
    workers: WorkerPool, model: str, arguments: dict[str, object]
) -> None:
    results = workers.run(jobs.buckets_are_messages, 2, model, arguments)
    assert results[0] == results[1]
    assert results[0]["planned"] == results[0]["reducer"]
    assert len(results[0]["planned"]) > 4
    profile = Profile.from_json(results[0]["profile"])
    network = Network.from_json(results[0]["network"])
    assert network.workers == profile.workers == 2
    assert network.points
    for planner in PLANNERS.values():
        assert planner.plan(profile, network).workers == 2


def test_three_workers(workers: WorkerPool) -> None:
    results = workers.run(jobs.buckets_are_messages, 3, "plain", {})
    assert results[0] == results[1] == results[2]
    assert results[0]["planned"] == results[0]["reducer"]


def test_goes_back_when_the_plan_is_slower(workers: WorkerPool) -> None:
    results = workers.run(jobs.reverts_when_slower, 2)
    for result in results:
        assert result["decision"] == "reverted"
        assert result["planner"] == "ddp"
        assert result["plan"]
        said = [text for text in result["said"] if "back to DDP's buckets" in text]
        assert len(said) == 1
        assert result["rechecked"]
        assert "wfbp took" in said[0]
        assert "DDP" in said[0]


def test_a_given_plan_is_used(workers: WorkerPool) -> None:
    for result in workers.run(jobs.with_given_plan, 2, jobs.plain_plan().to_json(), False):
        assert result["phases"] == ["recording", "steady"]
        assert result["decision"] == "planned"


def test_a_given_plan_is_checked(workers: WorkerPool) -> None:
    for result in workers.run(jobs.with_given_plan, 2, jobs.plain_plan().to_json(), True):
        phases = [phase for phase in result["phases"] if not phase.startswith("comparing")]
        assert phases == ["measuring DDP", "trying by hand", "recording", "steady"]
        assert result["decision"] in ("planned", "reverted")
        # Each begins where the one before ends; the very first iteration is in none.
        (first, *_), done = result["spans"], 1
        for name, start, iterations in result["spans"]:
            assert start == done, name
            done += iterations
        assert first[0] == "measuring DDP"
        assert done == result["steps"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    first_few(
        [
            ("one rank", "gradients are read before each step"),
            ("average", "parameters are read between each step and the next forward pass"),
            ("clip", "gradients are read before each step"),
            ("clip later", "gradients are read before each step"),
        ],
        2,
    ),
)
def test_deferring_is_given_up_where_all_is_read_at_every_step(
    workers: WorkerPool, kind: str, reason: str
) -> None:
    for result in workers.run(jobs.flushes, 2, kind):
        assert result["differences"] == []
        assert result["waits"] == ["need", "update"]
        assert (result["decision"], result["deferred"]) == ("planned", False)
        (said,) = result["said"]
        assert reason in said
        if "later" not in kind:  # not only when the trial is over
            assert result["tried"] == DEFERRED + SYNCS_CERTAIN_AFTER
        assert "from here on messages run under the backward pass only" in said


def test_deferring_stays_where_nothing_is_read(workers: WorkerPool) -> None:
    for result in workers.run(jobs.flushes, 2, "nothing"):
        assert result["differences"] == []
        assert result["waits"] == ["need"]
        assert (result["decision"], result["deferred"]) == ("planned", True)
        assert result["said"] == []


def test_a_plan_that_turns_slow_is_dropped(workers: WorkerPool) -> None:
    for result in workers.run(jobs.turns_slow, 2):
        assert result["phases"] == [
            "steady",
            "comparing with DDP",
            "comparing by hand",
            "recording",
            "steady",
        ]
        assert (result["decision"], result["deferred"]) == ("reverted", False)
        assert "by hand takes longer than DDP did; measuring both again" in result["said"]


def test_a_plan_for_another_worker_count_is_refused(workers: WorkerPool) -> None:
    for message in workers.run(jobs.refuses, 2, jobs.plain_plan(workers=5).to_json()):
        assert "the plan is for 5 workers, this job has 2" in message


def test_a_plan_for_another_model_is_refused(workers: WorkerPool) -> None:
    plan = jobs.plain_plan()
    tensors = (msgspec.structs.replace(plan.tensors[0], name="other.bias"), *plan.tensors[1:])
    other = msgspec.structs.replace(plan, tensors=tensors, model="Other")
    for message in workers.run(jobs.refuses, 2, other.to_json()):
        assert "'Other'" in message
        assert "narrow.bias" in message


@pytest.mark.parametrize("changed", FEATURES)
def test_a_plan_that_no_buckets_can_be_is_run(
    workers: WorkerPool, changed: dict[str, object]
) -> None:
    plan = msgspec.structs.replace(jobs.plain_plan(), **changed)
    for result in workers.run(jobs.compare_given_plan, 2, plan.to_json()):
        assert result["differences"] == []
        assert result["decision"] == "planned"
        assert result["messages"] == len(plan.messages)


def test_a_network_of_another_size_is_refused(workers: WorkerPool) -> None:
    for message in workers.run(jobs.refuses_network, 2, 8):
        assert "'elsewhere' is of 8 workers, this job has 2" in message


def test_a_bug_of_rank_0_ends_all_ranks(workers: WorkerPool) -> None:
    on_0, on_1 = workers.run(jobs.fails_to_plan, 2)
    assert on_0 == ["ZeroDivisionError", "a bug"]
    assert on_1[0] == "InternalError"
    assert "ZeroDivisionError: a bug" in on_1[1]


def test_what_the_wrapper_does_not_take(workers: WorkerPool) -> None:
    for messages in workers.run(jobs.refuses_hook_and_arguments, 2):
        hook, builtin_hook, group, planner, caps, both = messages
        assert "would replace the exchange" in hook
        assert "would replace the exchange" in builtin_hook
        assert "wrap the model again" in group
        assert "did you mean 'merge'" in planner
        assert "give a plan instead" in caps
        assert "would be ignored" in both


def test_the_arguments_of_torch_s_class() -> None:
    names = tuple(inspect.signature(TorchDDP).parameters)
    assert names[: len(DDP_ARGUMENTS) + 1] == ("module", *DDP_ARGUMENTS)
    assert set(COMPARED_ARGUMENTS) <= set(DDP_ARGUMENTS)


def test_a_tracer_around_the_constructor(workers: WorkerPool) -> None:
    """It hides the signature of torch's class."""
    for result in workers.run(jobs.wraps_under_a_tracer, 2):
        assert result["given"] == [((None, None, 0, None, True, None, 1), {"static_graph": True})]
        assert result["taken"] == (2**20, True)
        assert "find_unused_parameters is " in result["refused"]


def test_any_thread_may_read_how_training_goes(workers: WorkerPool) -> None:
    """What it reads is as it was after the last iteration, until the next has ended."""
    for result in workers.run(jobs.reads_in_the_midst_of_changes, 2):
        assert result["changes"] == ["decided", "no reducer"]
        assert result["differing"] == []
        assert result["first"] == {
            "syncline/iteration": 0,
            "syncline/steady": 0,
            "syncline/overlaps": 0,
        }
        last = result["last"]
        assert last["syncline/steady"] == 1
        assert last["syncline/messages"] >= 1
        assert last["syncline/iteration_s"] > 0
        assert last["syncline/exposed_communication_s"] >= 0


def test_a_property_that_fails_says_why(workers: WorkerPool) -> None:
    """Not that there is no such property, as ``nn.Module`` would say."""
    for said in workers.run(jobs.reads_a_broken_property, 2):
        assert len(said) == 3
        for name, text in zip(("phase", "plan", "measuring"), said, strict=True):
            expected = f"InternalError: {name} cannot be read: "
            assert text.startswith(expected)
            assert text.endswith("'MeasuredIterations' object has no attribute 'stage'")


@pytest.mark.parametrize("stock_outside", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_is_not_wrapped_twice(
    workers: WorkerPool, stock_outside: bool, inside: bool
) -> None:
    for refused in workers.run(jobs.wraps_twice, 2, stock_outside, inside):
        assert "wrapped in two DistributedDataParallel at once" in refused


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1}])
def test_a_wrapper_is_converted(workers: WorkerPool, options: dict[str, object]) -> None:
    for result in workers.run(jobs.converts, 2, options):
        assert result["same"]
        assert result["overlapped"] == ["AdamW"]
        assert result["defers"]
        assert result["differing"] == []
        hooked, converted = result["refused"]
        assert "has a communication hook" in hooked
        assert "expected a model wrapped in torch.nn.parallel" in converted
        metrics = result["metrics"]
        assert metrics["syncline/iteration"] == 8
        assert metrics["syncline/overlaps"] == 1
        assert metrics["syncline/messages"] > 1


def test_join_with_uneven_inputs(workers: WorkerPool) -> None:
    for result in workers.run(jobs.joins_uneven_inputs, 2):
        assert result == {"before": "measuring DDP", "after": "steady", "differences": []}


def test_what_the_user_attached_stays(workers: WorkerPool) -> None:
    for result in workers.run(jobs.keeps_what_the_user_attached, 2):
        assert result["calls"] == {"pre": result["steps"] + 1, "post": result["steps"] + 1}
        assert result["note"] == "kept"
        assert result["is_torch_ddp"]
        assert not result["training_in_eval"]
        assert result["module_is_plain"]


def test_the_time_in_evaluation_mode_is_no_part_of_an_iteration(workers: WorkerPool) -> None:
    for seconds in workers.run(jobs.leaves_training_after_every_step, 2):
        assert min(seconds.values()) > 0
        assert max(seconds.values()) < jobs.AWAY_S, seconds


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("sparse", "sparse"),
        ("dtypes", "several dtypes"),
        ("complex halves", "complex32"),
        ("no elements", "no gradient has an element"),
        ("no elements, a plan given", "no gradient has an element"),
    ],
)
def test_what_cannot_be_planned_trains(workers: WorkerPool, kind: str, reason: str) -> None:
    for result in workers.run(jobs.trains_unplannable, 2, kind):
        assert result["phase"] == "steady"
        assert result["decision"] == "ddp"
        assert reason in result["reason"]


def test_a_copy_trains_on(workers: WorkerPool) -> None:
    for result in workers.run(jobs.copies_and_pickles, 2):
        assert result == {"twin": "steady", "ours": "steady", "run": "ddp"}


def test_report(workers: WorkerPool, tmp_path) -> None:
    results = workers.run(jobs.writes_a_report, 2, str(tmp_path / "report"))
    page = tmp_path / "report" / "report.html"
    assert results[0]["path"] == str(page)
    assert page.read_text().startswith("<!doctype html>")
    names = {path.name for path in page.parent.iterdir()}
    assert {
        "run.json",
        "profile.json",
        "network.json",
        "plan.json",
        "comparison.json",
        "timeline-predicted.json",
        "timeline-measured.json",
        "trace.json",
    } <= names
    assert results[0]["exposed"] >= 0


def test_the_command_line_answers_as_the_run_did(workers: WorkerPool, tmp_path) -> None:
    """The same planner on the profile and network that the run has written, the same seconds."""
    told = workers.run(jobs.trains_with_overlap, 2, str(tmp_path))
    assert told == [["planned", "overlap"]] * 2
    files = [str(tmp_path / name) for name in ("profile.json", "network.json")]
    run = Comparison.load(tmp_path / "comparison.json")

    def said(*arguments: str) -> str:
        return CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False).stdout

    assert Plan.from_json(said("plan", *files)) == Plan.load(tmp_path / "plan.json")
    simulated = Comparison.from_json(said("simulate", *files))
    assert simulated.predictions == run.predictions
    assert simulated.chosen == run.chosen == "overlap"
    held = Comparison.from_json(said("simulate", *files, "--no-overlap"))
    assert {p.planner for p in held.predictions} == {p.planner for p in run.predictions} - {
        "overlap"
    }
    assert Plan.from_json(said("plan", *files, "--no-overlap")).planner == held.chosen


@pytest.mark.slow
def test_drift_is_measured_again(workers: WorkerPool) -> None:
    for result in workers.run(jobs.replans_after_drift, 2):
        assert "measuring DDP" in result["phases"]
        assert any("drifted" in text for text in result["events"])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})
        self.embedding = nn.Embedding(3, 8)


@pytest.mark.parametrize("how", first_few(["after", "before", "forward"]))
def test_of_a_compiled_model_is_told_once(workers: WorkerPool, how: str) -> None:
    said, of_rank_1 = workers.run(jobs.tells_of_a_compiled_model, 2, how)
    assert of_rank_1 == []
    (line,) = said
    assert line.startswith("overlap: updates are synchronous: the whole model is compiled")
    assert line.endswith("for block in model: block.compile()")


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (Blocks(), "model.inner.h"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "model"),
        (nn.Sequential(Blocks(), nn.Linear(2, 2)), "model"),
        (nn.Bilinear(2, 2, 2), "model.children()"),
    ],
)
def test_a_model_compiled_as_a_whole_is_told_its_blocks(model: nn.Module, blocks: str) -> None:
    line = f"for block in {blocks}: block.compile()"
    assert why_not_compiled(model).endswith(line)
    compiled = torch.compile(model, backend="eager")
    assert why_not_compiled(compiled).endswith(line)
