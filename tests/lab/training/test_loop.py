"""Whole trainings by two real workers: all in one pair of processes, since starting is slow."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from syncline.errors import UserError
from syncline.lab.training import loop
from syncline.lab.training.checkpoint import Checkpoint, load_checkpoint
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.data.text import PTB_FILES
from syncline.lab.training.loop import train
from syncline.lab.training.progress import TrainingProgress
from syncline.lab.training.result import (
    BASELINE,
    DIFFERENCE,
    SYNCHRONIZING,
)
from syncline.plan.run import Run
from tests.plan.documents import RUN
from tests.workers import WorkerPool

STEPS_PER_EPOCH = 11  # 1,438 digits, two workers, 64 a batch
pytestmark = pytest.mark.xdist_group("trainings")  # which are made once


def trainings(folder: Path) -> dict[str, TrainingConfig]:
    """Return what is trained, by name; "resumed" goes on from what "stopped" has left."""
    words = {"data_dir": str(folder), "overrides": {"epochs": 2, "batch_size": 2}}
    sharded = {**words, "accumulate": 2, "shard": True}
    digits = {"planner": "ddp", "overrides": {"epochs": 2, "batch_size": 64}}

    def config(name: str, model: str, data: str, **options: Any) -> TrainingConfig:
        parts = name.split()
        checkpoint = folder / (f"{parts[0]} in two parts" if len(parts) > 1 else name)
        return TrainingConfig.of(
            model,
            data,
            checkpoint=str(checkpoint),
            report=str(folder / f"report of {name}"),
            **options,
        )

    return {
        "digits": config(
            "digits", "resnet20", "digits", **digits | {"planner": "auto"}, baseline=True
        ),
        "digits stopped": config(
            "digits stopped", "resnet20", "digits", **digits, steps=STEPS_PER_EPOCH + 3
        ),
        "digits resumed": config("digits resumed", "resnet20", "digits", **digits, resume=True),
        "words": config("words", "lstm", "ptb", **words, accumulate=2),
        "words stopped": config("words stopped", "lstm", "ptb", **words, accumulate=2, steps=4),
        "words resumed": config("words resumed", "lstm", "ptb", **words, accumulate=2, resume=True),
        "sharded": config("sharded", "lstm", "ptb", **sharded),
        "sharded stopped": config("sharded stopped", "lstm", "ptb", **sharded, steps=4),
        "sharded resumed": config("sharded resumed", "lstm", "ptb", **sharded, resume=True),
        "bf16": config(
            "bf16",
            "transformer",
            "ptb",
            **words,
            precision="bf16",
            steps=2,
            baseline=True,
            block_steps=1,
        ),
        "rounded": config(
            "rounded", "lstm", "ptb", **words, steps=2, baseline=True, compression="bf16"
        ),
        "folder": config(
            "folder",
            "resnet20",
            "imagefolder",
            data_dir=str(folder),
            overrides={"batch_size": 2, "learning_rate": 0.01},
            steps=1,
        ),
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
    for split, colour in ((s, c) for s in ("train", "val") for c in ("red", "blue")):
        (folder / split / colour).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 36), colour).save(folder / split / colour / f"{number}.png")
    configs = trainings(folder)
    return configs, workers.run(train_all, 2, configs)


def checkpoint_of(trained: Trained, name: str) -> Checkpoint:
    return load_checkpoint(Path(trained[0][name].checkpoint or ""))[1]


@pytest.mark.parametrize("name", ["digits", "bf16"])
def test_the_twin_ends_with_the_same_bits(trained: Trained, name: str) -> None:
    assert trained[1][0][name].results[DIFFERENCE] == 0.0


def test_the_baseline_of_a_rounded_exchange_has_the_hook(trained: Trained) -> None:
    """Syncline's model sends whole gradients while it is measured."""
    assert trained[1][0]["rounded"].results[DIFFERENCE] > 0.0


def test_training_learns_and_every_rank_has_the_same_results(trained: Trained) -> None:
    results = [dict(runs["digits"].results) for runs in trained[1]]
    for result in results:
        del result["training seconds"], result[SYNCHRONIZING]
    assert results[0] == results[1]
    assert results[0]["training loss"] < 2.0
    assert results[0][f"{BASELINE} test accuracy"] == results[0]["test accuracy"]
    assert (results[0]["epochs"], results[0]["steps"]) == (2, 2 * STEPS_PER_EPOCH)


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
    whole, parts = checkpoint_of(trained, name), checkpoint_of(trained, f"{name} resumed")
    assert (whole.epoch, whole.step) == (parts.epoch, parts.step)
    assert whole.weights.keys() == parts.weights.keys()
    for key, value in whole.weights.items():
        assert torch.equal(value, parts.weights[key]), key
    momenta = [
        [state["momentum_buffer"] for state in checkpoint.optimizer["state"].values()]
        for checkpoint in (whole, parts)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))
    for a, b in zip(whole.random_states, parts.random_states, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_workers_drop_out_different_units(trained: Trained) -> None:
    first, second = checkpoint_of(trained, "words").random_states
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("name", ["words", "bf16"])
def test_texts_are_judged_by_perplexity(trained: Trained, name: str) -> None:
    results = trained[1][0][name].results
    assert 1 < results["validation perplexity"] < 12
    assert 1 < results["test perplexity"] < 12


def test_a_stop_within_an_epoch_leaves_the_checkpoint_of_the_last_whole_one(
    trained: Trained,
) -> None:
    results = trained[1][0]["digits stopped"].results
    assert (results["epochs"], results["steps"]) == (1, STEPS_PER_EPOCH + 3)
    assert not list(Path(trained[0]["bf16"].checkpoint or "").iterdir())


def train_too_fast(folder: str) -> str:
    config = TrainingConfig.of(
        "resnet20", "digits", overrides={"batch_size": 64, "learning_rate": 1e30}, report=folder
    )
    with pytest.raises(UserError) as caught:
        train(config)
    return str(caught.value)


def test_divergence_ends_training_with_advice(workers: WorkerPool, tmp_path: Path) -> None:
    for message in workers.run(train_too_fast, 2, str(tmp_path)):
        assert "training diverged: the loss of syncline on rank" in message
        assert "lower --lr (now 1e+30)" in message


def train_alone(folder: str) -> str:
    with pytest.raises(UserError) as caught:
        train(TrainingConfig.of("resnet20", "digits", workers=3, report=folder))
    return str(caught.value)


def test_another_number_of_workers_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    (message,) = workers.run(train_alone, 1, str(tmp_path))
    assert "--workers is 3, but the launcher started 1" in message


@pytest.mark.parametrize(("cache", "expected"), [(None, False), ("kept", "kept")])
def test_plans_are_kept_only_where_that_is_asked_for(
    cache: str | None, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(loop, "DistributedDataParallel", lambda _, **options: given.update(options))
    monkeypatch.setattr(loop, "Replica", lambda **_: None)
    worker: Any = SimpleNamespace(device=torch.device("cpu"), device_ids=None, rank=0)
    config = TrainingConfig.of("resnet20", "digits", cache=cache)
    loop._prepare(config, worker, TrainingProgress())
    assert given["cache"] == expected


def test_the_phase_is_shown_in_words_once_it_changes() -> None:
    ddp: Any = SimpleNamespace(phase="steady", exposed_communication_s=None, run_record=lambda: RUN)
    training: Any = loop._Training(
        config=TrainingConfig.of("resnet20", "digits"),
        worker=None,
        task=SimpleNamespace(steps_per_epoch=1),
        ddp=ddp,
        replicas=[],
        progress=TrainingProgress(),
    )
    assert training._snapshot(0.5, 100.0).phase == "running merge"
    del ddp.run_record  # which is not made at every step
    assert training._snapshot(0.5, 100.0).phase == "running merge"
    ddp.phase, ddp.run_record = "profiling", lambda: RUN
    assert training._snapshot(0.5, 100.0).phase == "profiling"
