"""Sharded optimizers: the results of whole ones, with each rank's part of the state."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncline.plan.plan import Message, Plan, Tensor
from syncline.train.overlap.sharding import common_elements
from syncline.train.overlap.trial import trial_of_slices
from tests.cases import first_few
from tests.train.overlap import overlap_jobs, overlap_optimizers, sharded_jobs
from tests.train.overlap.features import features
from tests.train.overlap.loop import REFUSED, TRAINS
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import OVERLAPS, STEPS
from tests.train.overlap.own_optimizers import TrustRatio
from tests.train.overlap.sharded_jobs import MAKERS
from tests.train.overlap.test_overlap_features import SHORT, chunks, require_same
from tests.workers import WorkerPool

DECOUPLED = Style(decoupled=True, piece_elements=70)
TRIED = [
    *(
        text
        for text in overlap_optimizers.PLAIN
        if text.startswith(("SGD", "Adam", "RMSprop", "Adagrad", "NAdam", "Rprop"))
    ),
    "`zero_grad()` after `step`",
    "`zero_grad(set_to_none=False)` before the forward pass",
    "gradient accumulation under `no_sync`",
    "gradient accumulation without `no_sync`",
    "a backward pass without a step, now and then",
    "`clip_grad_norm_` with `foreach=True`",
    "the same, where the norm is below the limit",
    "`clip_grad_norm_` of the max norm",
    "clipping every tenth step only",
    "`GradScaler`, with steps that it skips",
    "`clip_grad_value_`",
    "a learning-rate schedule made before `overlap`",
    "an average of the weights after each step (`AveragedModel`)",
    "evaluation in between, under `no_grad`",
]  # rows of the table of features that overlap with sharded optimizers, too
OTHERS = [text for text, row in features().items() if row.sharded == TRAINS and text not in TRIED]
GATHERED = [
    "`p.grad` read after `backward`",
    "`clip_grad_norm_` after one rank, another at each step, has read its gradients",
    "`GradScaler` with a fused optimizer",
]  # rows in which some rank reads gradients before the step, so that these are gathered
REASONS = {
    "never `zero_grad`: gradients add up": "was not set to zero after",
    "two steps in a row": "a second step was made",
    "a `no_sync` pass after the exchanged one, before `step`": "gradients differ at a step",
    "`p.grad` read after `step`": "read it before the step",
    "`state_dict` of model and optimizer between steps": "model.full_state_dict",
    "`join` in between": "join cannot be used",
    "Adafactor": "cannot be sharded",
    "Muon": "cannot be sharded",
}  # rows that raise, and a part of what they say
REFUSING = [t for t, row in features().items() if row.sharded == REFUSED and t not in REASONS]


@pytest.mark.parametrize(
    "rows", first_few(chunks(TRIED) + chunks(OTHERS)), ids=lambda rows: rows[0]
)
def test_results_are_those_of_ddp(workers: WorkerPool, rows: list[str]) -> None:
    steps = STEPS if rows[0] in TRIED else SHORT  # what happens is counted after those
    for results in workers.run(overlap_jobs.sharded_beside_ddp, 2, rows, Style(), 0.0, steps):
        require_same(rows, results)
        for row, result in zip(rows, results, strict=True):
            assert result["happened"] == OVERLAPS or row in OTHERS, row


def test_a_gradient_that_any_rank_reads_is_gathered(workers: WorkerPool) -> None:
    for results in workers.run(overlap_jobs.sharded_beside_ddp, 2, GATHERED, Style(), 0.0):
        require_same(GATHERED, results)


@pytest.mark.parametrize(
    "rows", first_few([[*REASONS], *chunks(REFUSING)]), ids=lambda rows: rows[0]
)
def test_what_cannot_be_right_raises(workers: WorkerPool, rows: list[str]) -> None:
    for results in workers.run(overlap_jobs.sharded_beside_ddp, 2, rows, Style(), 0.0):
        for row, result in zip(rows, results, strict=True):
            assert result.get("refused"), row
            assert REASONS.get(row, "") in result["refused"], row


@pytest.mark.slow
def test_three_ranks_and_other_messages(workers: WorkerPool) -> None:
    rows = ["Adam, foreach", "`clip_grad_norm_` with `foreach=True`", "shared and tied parameters"]
    style = Style(decoupled=True, order="7", piece_elements=77, in_flight=3)
    job = overlap_jobs.sharded_beside_ddp
    for results in workers.run(job, 3, rows, style, 0.3, backend="syncline"):
        require_same(rows, results)


def require_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check that two trainings have come to the same, but for last digits."""
    one, other = (torch.load(io.BytesIO(each["checkpoint"])) for each in (ours, theirs))
    for name, value in other["model"].items():
        torch.testing.assert_close(one["model"][name], value, rtol=1e-6, atol=1e-7)
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    for key, state in other["optimizer"]["state"].items():
        found = one["optimizer"]["state"][key]
        assert found.keys() == state.keys()
        for part, value in state.items():
            torch.testing.assert_close(found[part], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", first_few(sorted(MAKERS), 2))
def test_a_run_goes_on_with_another_number_of_ranks(
    workers: WorkerPool, name: str, in_parts: bool, tmp_path: Path
) -> None:
    """Two under a plan, three under DDP's buckets, two again; beside one that does not stop."""
    checkpoint, begin, folder = b"", 0, ""
    for ranks, style in ((2, DECOUPLED), (3, None), (2, DECOUPLED)):
        then = str(tmp_path / str(begin)) if in_parts else ""
        arguments = (name, True, style, checkpoint, begin, 6, (folder, then))
        found = workers.run(sharded_jobs.trained, ranks, *arguments)
        checkpoint, begin, folder = found[0]["checkpoint"], begin + 6, then
        for other in found[1:]:
            assert all(map(torch.equal, found[0]["parameters"], other["parameters"]))
        whole = sum(rank["elements"] for rank in found)
        assert all(rank["elements"] <= whole / ranks + 2 * 16 for rank in found)
        assert whole <= found[0]["whole"]
    (alone,) = workers.run(sharded_jobs.trained, 1, name, False, None, b"", 0, begin)
    require_alike(found[0], alone)


def test_what_is_measured_and_planned_is_sharded(workers: WorkerPool) -> None:
    """From the first iteration on, under DDP's buckets and under the plans that are tried."""
    one, other = workers.run(sharded_jobs.measured_and_planned, 2, 130)
    assert any(one["stages"].values()), one["stages"]
    assert one["stages"]["measuring DDP"] is False
    assert one["difference"] < 1e-5
    assert one["sharded profile"]
    assert one["update"]
    assert all(map(torch.equal, one["parameters"], other["parameters"]))


def test_parameters_in_16_bits_and_state_in_float32(workers: WorkerPool) -> None:
    found = workers.run(sharded_jobs.in_16_bits, 2, DECOUPLED)
    for differing, (sharded_bytes, whole_bytes) in found:
        assert differing == []
        assert sharded_bytes < 0.6 * whole_bytes


def test_refusals_say_what_to_do(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(sharded_jobs.refusals, 2, str(tmp_path / "saved"))


def test_an_optimizer_that_looks_at_whole_parameters_is_found() -> None:
    parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.tensor(1.0))]
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop, torch.optim.NAdam):
        assert trial_of_slices(kind(parameters, lr=0.1)).why_not is None
    reason = trial_of_slices(TrustRatio(parameters)).why_not
    assert reason is not None
    assert "updates a part of a parameter differently" in reason


def test_common_elements() -> None:
    found = list(common_elements([(0, 4), (10, 14)], [(2, 11), (13, 20)]))
    assert found == [(2, 0, 2), (4, 8, 1), (7, 9, 1)]


def test_a_plan_in_shards_has_all_sums_first() -> None:
    tensors = (Tensor(name="a", elements=8, dtype="float32"),)
    messages = Message(start=4, stop=8), Message(start=0, stop=4, delay_s=1.0)
    whole = Plan(planner="p", model="m", workers=2, tensors=tensors, messages=messages)
    plan = whole.in_shards()
    kinds = [m.collective for m in plan.messages]
    assert kinds == ["reduce-scatter"] * 2 + ["all-gather"] * 2
    assert [m.start for m in plan.messages] == [4, 0, 4, 0]
    assert plan.in_shards() is plan
    assert not plan.waiting_for_all().sharded
