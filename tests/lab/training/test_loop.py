"""Whole trainings by two real workers: all in one pair of processes, since starting is slow."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from syncline.errors import UserError
from syncline.lab.training import loop
from syncline.lab.training.checkpoint import Checkpoint, load_checkpoint
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.data.text import PTB_FILES
from syncline.lab.training.group import Worker
from syncline.lab.training.loop import train
from syncline.lab.training.progress import TrainingProgress
from syncline.lab.training.result import BASELINE, DIFFERENCE, SYNCHRONIZING
from syncline.plan.run import Run
from tests.plan.documents import RUN
from tests.workers import WorkerPool

STEPS_PER_EPOCH = 11  # 1,438 digits, two workers, 64 a batch
pytestmark = pytest.mark.xdist_group("trainings")  # which are made once


def trainings(folder: Path) -> dict[str, TrainingConfig]:
    """Return what is trained, by name; "resumed" goes on from what "stopped" has left."""
    small = {"epochs": 2, "batch_size": 2}
    words = {"model": "lstm", "data": "ptb", "overrides": small}
    digits = {"model": "resnet20", "data": "digits", "overrides": {"epochs": 2, "batch_size": 64}}
    whole: dict[str, dict[str, Any]] = {
        "digits": digits | {"planner": "ddp"},
        "words": words | {"accumulate": 2},
        "sharded": words | {"accumulate": 2, "shard": True},
    }
    steps = {"digits": STEPS_PER_EPOCH + 3, "words": 4, "sharded": 4}
    asked = {
        **whole,
        "digits": digits | {"baseline": True},
        **{f"{name} stopped": whole[name] | {"steps": steps[name]} for name in whole},
        **{f"{name} resumed": whole[name] | {"resume": True} for name in whole},
        "bf16": words
        | {"model": "transformer", "precision": "bf16", "steps": 2}
        | {"baseline": True, "block_steps": 1},
        "rounded": words | {"steps": 2, "baseline": True, "compression": "bf16"},
    }
    return {
        name: TrainingConfig.of(
            **options,
            data_dir=None if options["data"] == "digits" else str(folder),
            checkpoint=str(folder / name.replace("stopped", "parts").replace("resumed", "parts")),
            report=str(folder / f"report of {name}"),
        )
        for name, options in asked.items()
    }


def train_all(configs: dict[str, TrainingConfig]) -> dict[str, Run]:
    runs = {}
    for name, config in configs.items():
        Path(config.report).mkdir(exist_ok=True)
        Path(config.checkpoint or "").mkdir(exist_ok=True)
        runs[name] = train(config)
    return runs


Trained = tuple[dict[str, TrainingConfig], list[dict[str, Run]]]
"""The configurations, and the records of both ranks."""


@pytest.fixture(scope="module")
def trained(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trainings")
    draw = random.Random(0)
    for name, lines in zip(PTB_FILES, (80, 12, 12), strict=True):
        text = "\n".join(" ".join(draw.choices("abcdefgh", k=12)) for _ in range(lines))
        (folder / name).write_text(text)
    configs = trainings(folder)
    return configs, workers.run(train_all, 2, configs)


def checkpoint_of(trained: Trained, name: str) -> Checkpoint:
    return load_checkpoint(Path(trained[0][name].checkpoint or ""))[1]


@pytest.mark.parametrize("name", ["digits", "bf16"])
def test_the_baseline_ends_with_the_same_bits(trained: Trained, name: str) -> None:
    assert trained[1][0][name].results[DIFFERENCE] == 0.0


def test_the_baseline_of_a_rounded_exchange_has_the_hook(trained: Trained) -> None:
    """Syncline's model sends whole gradients while it is measured."""
    assert trained[1][0]["rounded"].results[DIFFERENCE] > 0.0


def test_training_learns_and_every_rank_has_the_same_results(trained: Trained) -> None:
    found, others = (dict(runs["digits"].results) for runs in trained[1])
    for name in ("training seconds", SYNCHRONIZING):
        del found[name], others[name]
    assert found == others
    assert found["training loss"] < 2.0
    assert found[f"{BASELINE} test accuracy"] == found["test accuracy"]
    assert (found["epochs"], found["steps"]) == (2, 2 * STEPS_PER_EPOCH)


def test_the_report_is_there(trained: Trained) -> None:
    for name, config in trained[0].items():
        assert (Path(config.report) / "report.html").stat().st_size > 1000
        assert Run.load(Path(config.report) / "run.json") == trained[1][0][name]


def test_each_rank_keeps_state_of_its_share(trained: Trained) -> None:
    (whole, _), sharded = trained[1][0]["words"].memory, trained[1][0]["sharded"].memory
    assert whole.state_bytes == whole.predicted_state_bytes == whole.parameters_bytes
    assert sum(rank.state_bytes for rank in sharded) == whole.state_bytes
    for rank in sharded:
        assert rank.state_bytes == pytest.approx(rank.predicted_state_bytes, rel=0.02)
        assert rank.peak_bytes > rank.parameters_bytes + rank.gradients_bytes > 0


@pytest.mark.parametrize("name", ["digits", "words", "sharded"])
def test_a_resumed_training_has_the_bits_of_an_unbroken_one(trained: Trained, name: str) -> None:
    both = (checkpoint_of(trained, name), checkpoint_of(trained, f"{name} resumed"))
    found = [(c.epoch, c.step, c.weights, c.optimizer["state"], c.random_states) for c in both]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_workers_drop_out_different_units(trained: Trained) -> None:
    first, second = checkpoint_of(trained, "words").random_states
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("name", ["words", "bf16"])
def test_texts_are_judged_by_perplexity(trained: Trained, name: str) -> None:
    results = trained[1][0][name].results
    assert 1 < results["validation perplexity"] < 12
    assert 1 < results["test perplexity"] < 12


def test_a_stop_within_an_epoch_leaves_the_checkpoint_before(trained: Trained) -> None:
    results = trained[1][0]["digits stopped"].results
    assert (results["epochs"], results["steps"]) == (1, STEPS_PER_EPOCH + 3)
    assert not list(Path(trained[0]["bf16"].checkpoint or "").iterdir())


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        train(TrainingConfig.of("resnet20", "digits", **options))
    return str(caught.value)


def test_divergence_ends_training_with_advice(workers: WorkerPool, tmp_path: Path) -> None:
    fast = {"overrides": {"batch_size": 64, "learning_rate": 1e30}, "report": str(tmp_path)}
    for message in workers.run(refused, 2, fast):
        assert "training diverged: the loss of syncline on rank" in message
        assert "lower --lr (now 1e+30)" in message


def test_another_number_of_workers_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    (message,) = workers.run(refused, 1, {"workers": 3, "report": str(tmp_path)})
    assert "--workers is 3, but the launcher started 1" in message


@pytest.mark.parametrize(("cache", "expected"), [(None, False), ("kept", "kept")])
def test_plans_are_kept_only_where_that_is_asked_for(
    cache: str | None, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = mock.Mock(side_effect=KeyboardInterrupt)  # no more of it is needed
    monkeypatch.setattr(loop, "DistributedDataParallel", wrapped)
    worker = Worker(rank=0, workers=2, device=torch.device("cpu"))
    monkeypatch.setattr(loop, "process_group", lambda *_: nullcontext(worker))
    with pytest.raises(KeyboardInterrupt):
        train(TrainingConfig.of("resnet20", "digits", cache=cache))
    assert wrapped.call_args.kwargs["cache"] == expected


def test_the_phase_is_shown_in_words_once_it_changes() -> None:
    ddp = mock.Mock(phase="steady", exposed_communication_s=None)
    ddp.run_record.return_value = RUN
    training = loop.Training(
        config=TrainingConfig.of("resnet20", "digits"),
        worker=mock.Mock(),
        task=mock.Mock(steps_per_epoch=1),
        ddp=ddp,
        replicas=[],
        progress=TrainingProgress(),
    )
    phases = [training.snapshot(0.5, 100.0).phase for _ in range(2)]
    assert phases == ["running merge"] * 2
    assert ddp.run_record.call_count == 1  # it is not made at every step
    ddp.phase = "profiling"
    assert training.snapshot(0.5, 100.0).phase == "profiling"
