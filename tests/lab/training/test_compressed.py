"""Compressed trainings by real workers: stopped, killed, resumed, also by more of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from syncline.errors import FileError
from syncline.lab.training.checkpoint import FILE_NAME, load_checkpoint
from syncline.lab.training.config import DENSE_BELOW, TrainingConfig
from syncline.lab.training.loop import train
from syncline.lab.training.residuals import drop_states, load_state, require_states, save_state
from syncline.lab.training.result import summary_json, summary_text
from syncline.plan.recipe import Recipe
from syncline.plan.run import Run
from tests.lab.testbed.machine import SYNCLINE, started
from tests.timeouts import DEADLINE_S, wait_until
from tests.workers import WorkerPool

STEPS_PER_EPOCH = 3  # 24 images, two workers, 4 a batch
GTOPK: dict[str, Any] = {"compression": "gtopk", "density": 0.02, "density_warmup": (0.25,)}


def few_images(folder: Path) -> str:
    """Draw images for epochs that take a moment; return the options to train on them."""
    draw = random.Random(0)
    for split, images in (("train", 12), ("val", 2)):
        for kind in ("one", "two"):
            (folder / split / kind).mkdir(parents=True)
            for number in range(images):
                image = Image.frombytes("RGB", (8, 8), draw.randbytes(192))
                image.save(folder / split / kind / f"{number}.png")
    return f"--data imagefolder --data-dir {folder} --batch-size 4"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    few_images(tmp_path)
    return tmp_path


def config_of(folder: Path, name: str, *, epochs: int = 2, **options: Any) -> TrainingConfig:
    checkpoint = folder / name
    checkpoint.mkdir(exist_ok=True)
    return TrainingConfig.of(
        "resnet20",
        "imagefolder",
        data_dir=str(folder),
        overrides={"epochs": epochs, "batch_size": 4, "learning_rate": 0.01},
        checkpoint=str(checkpoint),
        report=str(checkpoint),
        check=False,
        **options,
    )


def train_all(*configs: TrainingConfig) -> list[Run]:
    return [train(config) for config in configs]


def states_in(folder: Path) -> list[dict[str, Any]]:
    names = load_checkpoint(folder)[1].compression_files
    of_all = {"workers": len(names), "steps_per_epoch": STEPS_PER_EPOCH}
    return [dict(load_state(folder, names, rank=r, **of_all)) for r in range(len(names))]


def require_equal(one: Path, other: Path) -> None:
    found = []
    for folder in (one, other):
        checkpoint = load_checkpoint(folder)[1]
        states = [(state["step"], state["residuals"]) for state in states_in(folder)]
        found.append((checkpoint.step, checkpoint.weights, states))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def stopped_and_resumed(
    workers: WorkerPool, folder: Path, stop: int, **options: Any
) -> tuple[TrainingConfig, Run]:
    """Train at once, and in two parts that must end with the same bits; return the first."""
    whole = config_of(folder, "whole", **options)
    stopped = config_of(folder, "parts", **options, steps=stop)
    resumed = config_of(folder, "parts", **options, resume=True)
    runs = workers.run(train_all, 2, whole, stopped, resumed)
    require_equal(folder / "whole", folder / "parts")
    return whole, runs[0][0]


@pytest.mark.slow
def test_stepping_ahead_is_resumed_bit_for_bit(workers: WorkerPool, folder: Path) -> None:
    ran = stopped_and_resumed(workers, folder, STEPS_PER_EPOCH, **GTOPK, step_ahead=True)
    assert ", stepping ahead: 6 steps, " in summary_text(*ran)
    workers.run(train_all, 2, config_of(folder, "without", **GTOPK))
    ours, theirs = (load_checkpoint(folder / name)[1].weights for name in ("whole", "without"))
    assert any(not torch.equal(weights, theirs[name]) for name, weights in ours.items())


def test_stopped_and_resumed_is_the_same_bit_for_bit(workers: WorkerPool, folder: Path) -> None:
    # The checkpoint is of the first epoch.
    whole, run = stopped_and_resumed(workers, folder, STEPS_PER_EPOCH + 2, **GTOPK, epochs=3)
    names = [f"compression-9-{rank}.pt" for rank in range(2)]
    assert sorted(path.name for path in (folder / "parts").glob("compression-*")) == names
    assert run.sent is not None
    assert run.sent.steps == 3 * STEPS_PER_EPOCH
    assert run.compression == whole.recipe(STEPS_PER_EPOCH)
    words = f"gtopk at 0.25, 0.02, whole below {DENSE_BELOW} elements: 9 steps, "
    assert words in summary_text(whole, run)
    assert '"density":0.02' in summary_json(whole, run)

    # With another number of workers what is left is shared out, and epochs are counted on.
    before = states_in(folder / "parts")
    of_three = {"workers": 3, "steps_per_epoch": 2}
    shared = [load_state(folder / "parts", names, rank=r, **of_three) for r in range(3)]
    assert {state["step"] for state in shared} == {3 * 2}
    for name in before[0]["residuals"]:
        found, expected = (
            sum(state["residuals"][name].double() for state in states)
            for states in (shared, before)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    more = config_of(folder, "parts", epochs=4, workers=3, resume=True, **GTOPK)
    workers.run(train_all, 3, more)
    assert [state["step"] for state in states_in(folder / "parts")] == [4 * 2] * 3


@pytest.mark.slow
def test_8_bits_are_resumed_also_by_more_workers(workers: WorkerPool, folder: Path) -> None:
    ran = stopped_and_resumed(workers, folder, STEPS_PER_EPOCH, compression="int8")
    assert "int8: 6 steps, " in summary_text(*ran)
    before = states_in(folder / "parts")
    assert any(residual.any() for residual in before[0]["residuals"].values())
    more = config_of(folder, "parts", epochs=3, workers=3, resume=True, compression="int8")
    workers.run(train_all, 3, more)
    assert [state["step"] for state in states_in(folder / "parts")] == [6 + 2] * 3


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_bit_for_bit(workers: WorkerPool, folder: Path) -> None:
    def start(*more: str) -> subprocess.Popen[str]:
        options = (
            f"train --data imagefolder --data-dir {folder} --lr 0.01 --epochs 6 --batch-size 4 "
            "--compression gtopk --density 0.05 --no-check "
            f"--checkpoint {folder / 'parts'} --report {folder / 'report'}"
        )
        return started(*SYNCLINE, *options.split(), *more, session=True, OMP_NUM_THREADS="1")

    whole = config_of(folder, "whole", epochs=6, compression="gtopk", density=0.05)
    workers.run(train_all, 2, whole)
    killed, parts = start(), folder / "parts"
    wait_until(lambda: (parts / FILE_NAME).exists() or killed.poll() is not None, "a checkpoint")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=DEADLINE_S)
    left = ("compression-1-1.pt.partial", "compression-99-1.pt", "checkpoint.pt.partial")
    for name in left:
        (parts / name).write_bytes(b"half")
    (mine := parts / "compression-notes.pt").write_bytes(b"the user's")
    resumed = start("--resume")
    output, errors = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, errors
    assert "compression" in output
    assert not any((parts / name).exists() for name in left)
    mine.unlink()
    require_equal(folder / "whole", parts)


ROUNDED: dict[str, Any] = {"compression": "bf16", "steps": 5, "decided": False, "plan": None}


def test_files_of_states(tmp_path: Path) -> None:
    names = ["compression-5-0.pt"]
    save_state(tmp_path / names[0], ROUNDED)
    require_states(tmp_path, names)
    loaded = load_state(tmp_path, names, rank=0, workers=1, steps_per_epoch=1)
    assert loaded == ROUNDED
    with pytest.raises(FileError, match="copy all files of the checkpoint's folder"):
        require_states(tmp_path, ["compression-3-0.pt"])
    torch.save({"format": "other"}, tmp_path / names[0])
    with pytest.raises(FileError, match="expected a file of format"):
        load_state(tmp_path, names, rank=0, workers=1, steps_per_epoch=1)


def test_only_our_own_files_are_removed(tmp_path: Path) -> None:
    unfinished = ["checkpoint.pt.partial", "compression-5-0.pt.partial"]
    others = ["compression-3-0.pt", "compression-3-1.pt"]
    kept = ["checkpoint.pt", "compression-5-0.pt"]
    users = ["compression-a-b.pt", "compression-3-0.pt.bak", "my.partial", "compression-.pt"]
    for name in (*unfinished, *others, *kept, *users):
        (tmp_path / name).write_bytes(b"")
    drop_states(tmp_path, None)  # a training that begins anew may still be given up
    assert {path.name for path in tmp_path.iterdir()} == {*others, *kept, *users}
    drop_states(tmp_path, ["compression-5-0.pt"])
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *users}


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    sparse = {
        "version": 1,
        "recipe": msgspec.to_builtins(Recipe(density=0.1)),
        "ranks": 1,
        "rank": 0,
        "step": 0,
        "scale": 1.0,
        "residuals": {"w": torch.zeros(3)},
        "velocities": {},
        "rates": {},
        "decided": False,
        "plan": None,
    }
    names = ["compression-5-0.pt"]

    def load(state: dict[str, Any]) -> object:
        save_state(tmp_path / names[0], state)
        return load_state(tmp_path, names, rank=0, workers=1, steps_per_epoch=1)

    assert load(sparse)
    for state, changes in (
        (ROUNDED, {"steps": -1}),
        (ROUNDED, {"steps": None}),
        (ROUNDED, {"plan": 3}),
        (ROUNDED, {"x" * 5000: 3}),
        (sparse, {"recipe": {"density": 2}}),
        (sparse, {"recipe": torch.zeros(3)}),
        (sparse, {"step": True}),
        (sparse, {"scale": 0.0}),
        (sparse, {"rates": {"w": None}}),
        (sparse, {"residuals": {"w": None}}),
        (sparse, {"residuals": {"w": torch.zeros(3).to_sparse()}}),
        (sparse, {"residuals": {"w": torch.zeros(3, dtype=torch.int64)}}),
    ):
        with pytest.raises(FileError, match=r"compression-5-0.pt: damaged: .{1,500}; resume from"):
            load({**state, **changes})
    with pytest.raises(FileError, match=r"compression-5-0.pt: damaged: .*missing required"):
        load({key: value for key, value in sparse.items() if key != "recipe"} | {"recipe": {}})
