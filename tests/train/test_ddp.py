"""DistributedDataParallel through real process groups."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.cli.commands import cli
from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.prediction import Comparison
from syncline.plan.profile import ACCUMULATING
from syncline.torch_entry import LAUNCHED
from syncline.torch_private import DDP_ARGUMENTS
from syncline.train.compilation import repeated_blocks, why_not_compiled
from syncline.train.experiments import DEFERRED, REBUILT
from syncline.train.requirements import COMPARED_ARGUMENTS
from syncline.train.stage_runner import SYNCS_CERTAIN_AFTER
from tests.cases import first_few
from tests.train import jobs
from tests.words import assert_tells
from tests.workers import WorkerPool

PLAN = jobs.plain_plan()
UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
WFBP = {"planner": "wfbp"}


@pytest.mark.parametrize(
    ("model", "optimizer", "options"),
    [
        *first_few([("plain", optimizer, WFBP) for optimizer in ("sgd", "adam", "adamw")]),
        *first_few([("shared", optimizer, WFBP) for optimizer in ("sgd", "adam", "adamw")]),
        *first_few([("unused", "adam", {**WFBP, **UNUSED, **more}) for more in (VIEWS, {})]),
        *first_few(
            [
                ("plain", "sgd", {"planner": "auto"}),
                ("mixed", "sgd", {"planner": "merge"}),
                ("plain", "sgd", {**WFBP, "accumulate": 3}),
                ("plain", "sgd", {**WFBP, "bf16": True}),
                ("plain", "sgd", {"planner": "merge", **VIEWS}),
                ("plain", "sgd", {**WFBP, "static_graph": True}),
                ("plain", "sgd", {**WFBP, "bucket_cap_mb": 1}),
            ],
            3,
        ),
        *first_few(
            [("mixed", "adamw", {"planner": "auto", **more}) for more in (UNUSED, VIEWS)], 0
        ),
    ],
    ids=str,
)
def test_bits_agree_with_ddp(
    workers: WorkerPool, model: str, optimizer: str, options: dict[str, object]
) -> None:
    for result in workers.run(jobs.compare_with_ddp, 2, model, optimizer, options):
        assert result["differences"] == []
        assert result["phases"][-1] == "steady"
        assert options["planner"] == "auto" or result["run"].decision == "planned"
        if options == WFBP:
            # Only this model has more than twice as many messages under the plan as under DDP.
            calibrated = ["calibrating with 12 equal parts"] if model == "shared" else []
            tried = [*calibrated, "trying wfbp"]
            assert result["phases"] == ["measuring DDP", "profiling", *tried, "recording", "steady"]
        # On a GPU the host waits once a stage: waiting in every iteration would change their times.
        assert result["settled"].count("profiling") == 1
        # Parameters are first read in the first of several micro-batches.
        profile = result["profile"]
        accumulating = [n for n, o in enumerate(profile.operations) if o.name == ACCUMULATING]
        assert len(accumulating) == ("accumulate" in options)
        for each in accumulating:
            assert max(gradient.needed_by for gradient in profile.gradients) < each


@pytest.mark.parametrize(
    ("model", "arguments", "count"),
    first_few(
        [
            ("shared", {}, 2),
            ("unused", UNUSED, 2),
            ("plain", {}, 3),
            ("plain", UNUSED, 2),
            ("plain", {"static_graph": True}, 2),
        ],
        3,
    ),
)
def test_buckets_are_exactly_the_messages(
    workers: WorkerPool, model: str, arguments: dict[str, object], count: int
) -> None:
    first, *others = workers.run(jobs.buckets_are_messages, count, model, arguments)
    assert others == [first] * (count - 1)
    assert first["planned"] == first["reducer"]
    assert len(first["planned"]) > 4
    profile, network = first["profile"], first["network"]
    assert network.workers == profile.workers == count
    assert network.points
    for planner in PLANNERS.values():
        assert planner.plan(profile, network).workers == count


@pytest.mark.parametrize(
    ("check", "measured"), [(False, []), (True, ["measuring DDP", "trying by hand"])]
)
def test_a_given_plan_is_used(workers: WorkerPool, check: bool, measured: list[str]) -> None:
    for steps, run in workers.run(jobs.with_given_plan, 2, check):
        assert (run.decision, run.messages) == ("planned", len(PLAN.messages))
        assert [phase.name for phase in run.phases] == [*measured, "recording", "steady"]
        # Each begins where the one before ends; how training itself warms up is in none.
        done = run.phases[0].start
        assert done == (1 if check else REBUILT)
        for phase in run.phases:
            assert phase.start == done, phase
            done += phase.iterations
        assert done == steps


@pytest.mark.parametrize(
    ("kind", "reason"),
    first_few(
        [
            ("nothing", None),
            ("one rank", "gradients are read before each step"),
            ("average", "parameters are read between each step and the next forward pass"),
            ("clip", "gradients are read before each step"),
            ("clip later", "gradients are read before each step"),
        ],
        2,
    ),
)
def test_deferring_is_given_up_where_all_is_read_at_every_step(
    workers: WorkerPool, kind: str, reason: str | None
) -> None:
    for result in workers.run(jobs.flushes, 2, kind):
        run = result["run"]
        assert result["differences"] == []
        assert result["waits"] == (["need", "update"] if reason else ["need"])
        assert (run.decision, run.deferred) == ("planned", reason is None)
        said = [event for event in run.events if "gains nothing" in event.text]
        assert len(said) == (reason is not None)
        for event in said:
            assert_tells(event.text, reason, "messages run under the backward pass only")
            if "later" not in kind:  # not only when the trial is over
                (tried,) = [phase for phase in run.phases if phase.name.startswith("trying")]
                assert event.iteration - tried.start == DEFERRED + SYNCS_CERTAIN_AFTER


def test_the_arguments_of_torch_s_class() -> None:
    names = tuple(inspect.signature(TorchDDP).parameters)
    assert names[: len(DDP_ARGUMENTS) + 1] == ("module", *DDP_ARGUMENTS)
    assert set(COMPARED_ARGUMENTS) <= set(DDP_ARGUMENTS)


# What these find they check themselves, on every rank.
@pytest.mark.parametrize(
    "job",
    [
        jobs.goes_back_when_the_plan_is_slower,
        jobs.a_plan_that_turns_slow_is_dropped,
        jobs.a_bug_of_rank_0_ends_all_ranks,
        jobs.averages_that_do_not_fit_are_refused,
        jobs.hooks_and_groups_are_refused,
        jobs.a_tracer_hides_the_signature_of_torch_s_class,
        jobs.any_thread_may_read_how_training_goes,
        jobs.a_property_that_fails_says_why,
        jobs.uneven_inputs_are_joined,
        jobs.what_the_user_attached_stays,
        jobs.time_in_evaluation_mode_is_no_part_of_an_iteration,
        jobs.a_copy_trains_on,
    ],
)
def test_on_two_ranks(workers: WorkerPool, job: Callable[[], None]) -> None:
    workers.run(job, 2)


@pytest.mark.parametrize("stock_outside", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_is_not_wrapped_twice(
    workers: WorkerPool, stock_outside: bool, inside: bool
) -> None:
    for refused in workers.run(jobs.wraps_twice, 2, stock_outside, inside):
        assert "wrapped in two DistributedDataParallel at once" in refused[1]


@pytest.mark.parametrize("options", [{}, UNUSED, {"bucket_cap_mb": 1}])
def test_a_wrapper_is_converted(workers: WorkerPool, options: dict[str, object]) -> None:
    workers.run(jobs.converts, 2, options)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("sparse", "sparse"),
        ("dtypes in a static graph", "several dtypes in a static graph"),
        ("complex halves", "complex32"),
        ("no elements", "no gradient has an element"),
        ("no elements, a plan given", "no gradient has an element"),
    ],
)
def test_what_cannot_be_planned_trains(workers: WorkerPool, kind: str, reason: str) -> None:
    for phase, run in workers.run(jobs.trains_unplannable, 2, kind):
        assert (phase, run.decision) == ("steady", "ddp")
        assert reason in run.reason


def test_report(workers: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    workers.run(jobs.writes_a_report, 2, str(folder), {"planner": "wfbp", "check": False})
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    documents = "run profile network plan comparison trace timeline-predicted timeline-measured"
    assert {f"{name}.json" for name in documents.split()} <= {p.name for p in folder.iterdir()}


def test_the_command_line_answers_as_the_run_did(workers: WorkerPool, tmp_path: Path) -> None:
    """The same planner on the profile and network that the run has written, the same seconds."""
    runs = workers.run(jobs.writes_a_report, 2, str(tmp_path), {})
    run = Comparison.load(tmp_path / "comparison.json")
    # Mostly overlap; on a busy machine messages may take more from computing than it gains.
    assert {(each.decision, each.planner) for each in runs} == {("planned", run.chosen)}
    files = [str(tmp_path / name) for name in ("profile.json", "network.json")]

    def said(*arguments: str) -> str:
        return CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False).stdout

    assert Plan.from_json(said("plan", *files)) == Plan.load(tmp_path / "plan.json")
    simulated = Comparison.from_json(said("simulate", *files))
    assert simulated.predictions == run.predictions
    assert simulated.chosen == run.chosen
    held = Comparison.from_json(said("simulate", *files, "--no-overlap"))
    others = {p.planner for p in run.predictions} - {"overlap"}
    assert {p.planner for p in held.predictions} == others
    assert Plan.from_json(said("plan", *files, "--no-overlap")).planner == held.chosen


@pytest.mark.slow
def test_drift_is_measured_again(workers: WorkerPool) -> None:
    for run in workers.run(jobs.replans_after_drift, 2):
        assert "measuring DDP" in [phase.name for phase in run.phases[1:]]
        assert any("drifted" in event.text for event in run.events)


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
    said = r"syncline: (\w+: )?overlap: updates are synchronous: the whole model is compiled"
    assert re.match(said, line)
    assert line.endswith("for block in model: block.compile()")


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (Blocks(), "model.inner.h"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "model"),
        (nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))), "model"),
        (nn.Sequential(Blocks(), nn.Linear(2, 2)), "model"),
        (nn.Bilinear(2, 2, 2), "model.children()"),
    ],
)
def test_a_model_compiled_as_a_whole_is_told_its_blocks(
    model: nn.Module, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"for block in {blocks}: block.compile()"
    assert why_not_compiled(model).endswith(line)
    compiled = torch.compile(model, backend="eager")
    assert why_not_compiled(compiled).endswith(line)
    monkeypatch.setenv(LAUNCHED, "")
    assert ("--compile-blocks" in why_not_compiled(compiled)) == bool(repeated_blocks(model))
