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
from tests.train.overlap import overlap_jobs, sharded_jobs, sharded_rows
from tests.train.overlap.features import features
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import OVERLAPS
from tests.train.overlap.sharded_jobs import MAKERS
from tests.train.overlap.test_overlap_features import AT_ONCE
from tests.workers import WorkerPool

DECOUPLED = Style(decoupled=True, piece_elements=70)
SAME = [row for row in features() if sharded_rows.sharded(row) == "trains"]
TRIED = [
    row.text
    for row in features().values()
    if row.group == "overlap_optimizers"
    and row.text.startswith(("SGD", "Adam", "RMSprop", "Adagrad", "NAdam", "Rprop"))
    and row.text != "Adafactor"
] + [
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
]
"""Rows of the table of features that are the same with sharded optimizers."""
GATHERED = [
    "`p.grad` read after `backward`",
    "`clip_grad_norm_` after one rank, another at each step, has read its gradients",
    "`GradScaler` with a fused optimizer",
]
"""Rows in which some rank reads gradients before the step, so that these are gathered."""
REFUSED = {
    "never `zero_grad`: gradients add up": "was not set to zero after",
    "two steps in a row": "a second step was made",
    "a `no_sync` pass after the exchanged one, before `step`": "gradients differ at a step",
    "`p.grad` read after `step`": "read it before the step",
    "`state_dict` of model and optimizer between steps": "model.full_state_dict",
    "`join` in between": "join cannot be used",
    "Adafactor": "cannot be sharded",
    "Muon": "cannot be sharded",
}
"""Rows that raise, and a part of what they say."""


def chunks(rows: list[str]) -> list[list[str]]:
    return [rows[at : at + AT_ONCE] for at in range(0, len(rows), AT_ONCE)]


@pytest.mark.parametrize("rows", first_few(chunks(TRIED)), ids=lambda rows: rows[0])
def test_results_are_those_of_stock_ddp(workers: WorkerPool, rows: list[str]) -> None:
    for results in workers.run(overlap_jobs.sharded_beside_stock, 2, rows, Style(), 0.0):
        for row, result in zip(rows, results, strict=True):
            assert (row, result.get("differences"), result.get("happened")) == (row, [], OVERLAPS)


def test_a_gradient_that_any_rank_reads_is_gathered(workers: WorkerPool) -> None:
    for results in workers.run(overlap_jobs.sharded_beside_stock, 2, GATHERED, Style(), 0.0):
        assert [r["differences"] for r in results] == [[]] * len(GATHERED)


def test_what_cannot_be_right_raises(workers: WorkerPool) -> None:
    for results in workers.run(overlap_jobs.sharded_beside_stock, 2, [*REFUSED], Style(), 0.0):
        for (row, reason), result in zip(REFUSED.items(), results, strict=True):
            assert reason in result.get("refused", ""), row


@pytest.mark.slow
@pytest.mark.parametrize("rows", chunks(SAME), ids=lambda rows: rows[0])
def test_every_other_row_comes_to_the_same(workers: WorkerPool, rows: list[str]) -> None:
    for results in workers.run(overlap_jobs.sharded_beside_stock, 2, rows, Style(), 0.0):
        assert {row: r.get("differences") for row, r in zip(rows, results, strict=True)} == {
            row: [] for row in rows
        }


@pytest.mark.slow
@pytest.mark.parametrize("row", sorted(sharded_rows.REFUSED))
def test_what_is_refused(workers: WorkerPool, row: str) -> None:
    for (result,) in workers.run(overlap_jobs.sharded_beside_stock, 2, [row], Style(), 0.0):
        assert result.get("refused")


def test_three_ranks_and_other_messages(workers: WorkerPool) -> None:
    rows = ["Adam, foreach", "`clip_grad_norm_` with `foreach=True`", "shared and tied parameters"]
    style = Style(decoupled=True, order="7", piece_elements=77, in_flight=3)
    job = overlap_jobs.sharded_beside_stock
    for results in workers.run(job, 3, rows, style, 0.3, backend="syncline"):
        assert [r["differences"] for r in results] == [[]] * len(rows)


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


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_run_goes_on_with_another_number_of_ranks(workers: WorkerPool, name: str) -> None:
    """Two ranks under a plan, three under DDP's buckets, two again, and one rank unsharded."""
    checkpoint, begin = b"", 0
    for ranks, shard, style in ((2, True, DECOUPLED), (3, True, None), (2, True, DECOUPLED)):
        found = workers.run(sharded_jobs.trained, ranks, name, shard, style, checkpoint, begin, 6)
        checkpoint, begin = found[0]["checkpoint"], begin + 6
        for other in found[1:]:
            assert all(map(torch.equal, found[0]["parameters"], other["parameters"]))
        whole = sum(rank["elements"] for rank in found)
        assert all(rank["elements"] <= whole / ranks + 2 * 16 for rank in found)
        assert whole <= found[0]["whole"]
    (alone,) = workers.run(sharded_jobs.trained, 1, name, False, None, b"", 0, begin)
    require_alike(found[0], alone)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_checkpoint_in_parts_fits_any_number_of_ranks(
    workers: WorkerPool, name: str, tmp_path: Path
) -> None:
    """Three save, two load and save, three load; beside one rank that goes on without a stop."""
    checkpoint, begin, folder = b"", 0, ""
    for ranks, style in ((3, DECOUPLED), (2, None), (3, DECOUPLED)):
        then = str(tmp_path / str(begin))
        arguments = (name, True, style, checkpoint, begin, 6, (folder, then))
        found = workers.run(sharded_jobs.trained, ranks, *arguments)
        checkpoint, begin, folder = found[0]["checkpoint"], begin + 6, then
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
    for differing, (sharded_bytes, whole_bytes) in workers.run(
        sharded_jobs.in_16_bits, 2, DECOUPLED
    ):
        assert differing == []
        assert sharded_bytes < 0.6 * whole_bytes


def test_refusals_say_what_to_do(workers: WorkerPool, tmp_path: Path) -> None:
    for said in workers.run(sharded_jobs.refusals, 2, str(tmp_path / "saved")):
        parts = [
            "Adafactor cannot be sharded",
            "full_state_dict is for optimizers that this model shards",
            "model.overlap(optimizer, shard=True) before training",
            "call model.full_state_dict(optimizer)",
            "no checkpoint can be read",
            "no sharded optimizer under 'other'",
            "called twice",
            "all optimizers of a model are sharded, or none",
            "nothing can be sharded here: gradients are of several dtypes",
        ]
        for part, text in zip(parts, said, strict=True):
            assert part in text


class TrustRatio(torch.optim.Optimizer):
    """Divides each parameter's update by the gradient's norm, as LAMB and LARS do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


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
    plan = Plan(
        planner="p",
        model="m",
        workers=2,
        tensors=(Tensor(name="a", elements=8, dtype="float32"),),
        messages=(Message(start=4, stop=8), Message(start=0, stop=4, delay_s=1.0)),
    ).in_shards()
    kinds = [m.collective for m in plan.messages]
    assert kinds == ["reduce-scatter"] * 2 + ["all-gather"] * 2
    assert [m.start for m in plan.messages] == [4, 0, 4, 0]
    assert plan.in_shards() is plan
    assert not plan.waiting_for_all().sharded
