"""Compressed trainings by real workers: stopped, killed, resumed, also by more of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from syncline.errors import FileError, UserError
from syncline.lab.training.checkpoint import load_checkpoint
from syncline.lab.training.config import DENSE_BELOW, TrainingConfig
from syncline.lab.training.loop import train
from syncline.lab.training.residuals import drop_states, load_state, require_states, save_state
from syncline.lab.training.result import summary_json, summary_text
from syncline.plan.recipe import Recipe
from syncline.plan.run import Run
from tests.timeouts import DEADLINE_S
from tests.workers import WorkerPool

STEPS_PER_EPOCH = 3  # 24 images, two workers, 4 a batch
GTOPK: dict[str, Any] = {
    "compression": "gtopk",
    "density": 0.02,
    "density_warmup": (0.25,),
    "check": False,
}


def write_images(folder: Path) -> None:
    draw = random.Random(0)
    for split, images in (("train", 12), ("val", 2)):
        for kind in ("one", "two"):
            (folder / split / kind).mkdir(parents=True)
            for number in range(images):
                image = Image.frombytes("RGB", (8, 8), draw.randbytes(192))
                image.save(folder / split / kind / f"{number}.png")


def config_of(folder: Path, name: str, *, epochs: int = 3, **options: Any) -> TrainingConfig:
    checkpoint = folder / name
    checkpoint.mkdir(exist_ok=True)
    return TrainingConfig.of(
        "resnet20",
        "imagefolder",
        data_dir=str(folder),
        overrides={"epochs": epochs, "batch_size": 4, "learning_rate": 0.01},
        checkpoint=str(checkpoint),
        report=str(checkpoint),
        **options,
    )


def train_all(configs: list[TrainingConfig]) -> list[Run]:
    return [train(config) for config in configs]


def states_in(folder: Path) -> list[dict[str, Any]]:
    _, checkpoint = load_checkpoint(folder)
    names = checkpoint.compression_files
    found = [
        load_state(folder, names, rank=r, workers=len(names), steps_per_epoch=STEPS_PER_EPOCH)
        for r in range(len(names))
    ]
    return [dict(state) for state in found]


def require_equal(one: Path, other: Path) -> None:
    (_, ours), (_, theirs) = load_checkpoint(one), load_checkpoint(other)
    assert ours.step == theirs.step
    for name, values in ours.weights.items():
        assert torch.equal(values, theirs.weights[name]), name
    for mine, its in zip(states_in(one), states_in(other), strict=True):
        assert mine["step"] == its["step"]
        for name, values in mine["residuals"].items():
            assert torch.equal(values, its["residuals"][name]), name


def test_stepping_ahead_is_resumed_bit_for_bit(workers: WorkerPool, tmp_path: Path) -> None:
    write_images(tmp_path)
    ahead = GTOPK | {"step_ahead": True}
    runs = workers.run(
        train_all,
        2,
        [
            whole := config_of(tmp_path, "whole", epochs=2, **ahead),
            config_of(tmp_path, "parts", epochs=2, **ahead, steps=STEPS_PER_EPOCH),
            config_of(tmp_path, "parts", epochs=2, **ahead, resume=True),
            config_of(tmp_path, "without", epochs=2, **GTOPK),
        ],
    )
    require_equal(tmp_path / "whole", tmp_path / "parts")
    assert ", stepping ahead: 6 steps, " in summary_text(whole, runs[0][0])
    (_, ours), (_, theirs) = (load_checkpoint(tmp_path / n) for n in ("whole", "without"))
    assert any(not torch.equal(w, theirs.weights[name]) for name, w in ours.weights.items())


def test_stopped_and_resumed_is_the_same_bit_for_bit(workers: WorkerPool, tmp_path: Path) -> None:
    write_images(tmp_path)
    stopped = STEPS_PER_EPOCH + 2  # the checkpoint is of the first epoch
    runs = workers.run(
        train_all,
        2,
        [
            whole := config_of(tmp_path, "whole", **GTOPK),
            config_of(tmp_path, "parts", **GTOPK, steps=stopped),
            config_of(tmp_path, "parts", **GTOPK, resume=True),
        ],
    )
    require_equal(tmp_path / "whole", tmp_path / "parts")
    kept = [path.name for path in (tmp_path / "parts").glob("compression-*")]
    assert sorted(kept) == [f"compression-9-{rank}.pt" for rank in range(2)]
    run = runs[0][0]
    assert run.sent is not None
    assert run.sent.steps == 3 * STEPS_PER_EPOCH
    assert run.compression == Recipe(
        density=0.02,
        warmup=(0.25,),
        warmup_steps=STEPS_PER_EPOCH,
        dense_below_elements=DENSE_BELOW,
    )
    words = f"gtopk at 0.25, 0.02, whole below {DENSE_BELOW} elements: 9 steps, "
    assert words in summary_text(whole, run)
    assert '"density":0.02' in summary_json(whole, run)

    # With another number of workers what is left is shared out, and epochs are counted on.
    before = states_in(tmp_path / "parts")
    three = config_of(tmp_path, "parts", epochs=4, workers=3, resume=True, **GTOPK)
    names = [f"compression-9-{rank}.pt" for rank in range(2)]
    shared = [
        load_state(tmp_path / "parts", names, rank=rank, workers=3, steps_per_epoch=2)
        for rank in range(3)
    ]
    assert {state["step"] for state in shared} == {3 * 2}
    for name in before[0]["residuals"]:
        found = sum(state["residuals"][name].double() for state in shared)
        expected = sum(state["residuals"][name].double() for state in before)
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    workers.run(train_all, 3, [three])
    after = states_in(tmp_path / "parts")
    assert len(after) == 3
    assert {state["step"] for state in after} == {4 * 2}


def test_8_bits_are_resumed_bit_for_bit_and_by_more_workers(
    workers: WorkerPool, tmp_path: Path
) -> None:
    write_images(tmp_path)
    in_8_bits: dict[str, Any] = {"compression": "int8", "check": False}
    runs = workers.run(
        train_all,
        2,
        [
            whole := config_of(tmp_path, "whole", epochs=2, **in_8_bits),
            config_of(tmp_path, "parts", epochs=2, **in_8_bits, steps=STEPS_PER_EPOCH),
            config_of(tmp_path, "parts", epochs=2, **in_8_bits, resume=True),
        ],
    )
    require_equal(tmp_path / "whole", tmp_path / "parts")
    assert "int8: 6 steps, " in summary_text(whole, runs[0][0])
    before = states_in(tmp_path / "parts")
    assert any(residual.any() for residual in before[0]["residuals"].values())
    workers.run(
        train_all, 3, [config_of(tmp_path, "parts", epochs=3, workers=3, resume=True, **in_8_bits)]
    )
    assert [state["step"] for state in states_in(tmp_path / "parts")] == [6 + 2] * 3


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    write_images(tmp_path)

    def start(name: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from syncline.cli import main; main()", "train"]
        command += ["--data", "imagefolder", "--data-dir", str(tmp_path), "--lr", "0.01"]
        command += ["--epochs", "8", "--batch-size", "4", "--compression", "gtopk", "--no-check"]
        command += ["--density", "0.05"]
        command += ["--checkpoint", str(tmp_path / name), "--report", str(tmp_path / "report")]
        return subprocess.Popen(
            [*command, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ended(process: subprocess.Popen[str]) -> None:
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
        assert "compression" in output

    ended(start("whole"))
    killed = start("parts")
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "parts" / "checkpoint.pt").exists():
        assert killed.poll() is None, killed.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=DEADLINE_S)
    left = ("compression-1-1.pt.partial", "compression-99-1.pt", "checkpoint.pt.partial")
    for name in left:
        (tmp_path / "parts" / name).write_bytes(b"half")
    (mine := tmp_path / "parts" / "compression-notes.pt").write_bytes(b"the user's")
    ended(start("parts", "--resume"))
    assert not any((tmp_path / "parts" / name).exists() for name in left)
    mine.unlink()
    require_equal(tmp_path / "whole", tmp_path / "parts")


def rounded_state(step: int) -> dict[str, Any]:
    return {"compression": "bf16", "steps": step, "decided": False, "plan": None}


def test_files_of_states(tmp_path: Path) -> None:
    for step in (3, 5):
        save_state(tmp_path / f"compression-{step}-0.pt", rounded_state(step))
    names = ["compression-5-0.pt"]
    require_states(tmp_path, names)
    drop_states(tmp_path, names)
    assert [path.name for path in tmp_path.iterdir()] == names
    loaded = load_state(tmp_path, names, rank=0, workers=1, steps_per_epoch=1)
    assert loaded == rounded_state(5)
    with pytest.raises(FileError, match="copy all files of the checkpoint's folder"):
        require_states(tmp_path, ["compression-3-0.pt"])
    torch.save({"format": "other"}, tmp_path / "compression-5-0.pt")
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
    tensors = {"w": torch.zeros(3)}
    sparse = {
        "version": 1,
        "recipe": msgspec.to_builtins(Recipe(density=0.1)),
        "ranks": 1,
        "rank": 0,
        "step": 5,
        "scale": 1.0,
        "residuals": tensors,
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
        (rounded_state(5), {"steps": -1}),
        (rounded_state(5), {"steps": None}),
        (rounded_state(5), {"plan": 3}),
        (rounded_state(5), {"x" * 5000: 3}),
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"density": 0.1}, "--density is for sparse exchange"),
        ({"density_warmup": (0.1,)}, "--density-warmup is for sparse exchange"),
        ({"compression": "gtop"}, "unknown compression 'gtop'; did you mean 'gtopk'?"),
        ({"compression": "gtopk"}, "--compression gtopk needs --density"),
        ({"compression": "gtopk", "density": 0.0}, "a density is above 0 and at most 1, found 0"),
        ({"compression": "topk", "density": 0.1, "density_warmup": (2.0,)}, "found 2.0"),
        ({"compression": "fp16", "density": 0.1}, "sends every element, so there is no density"),
        ({"compression": "fp16", "dense_below": 0}, "sends every element, so there is no density"),
        ({"dense_below": 64}, "--dense-below is for sparse exchange"),
        ({"step_ahead": True}, "--step-ahead is for sparse exchange"),
        ({"compression": "bf16", "step_ahead": True}, "sends every element, so there is no dens"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        TrainingConfig.of("resnet20", "digits", **options)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("gtopk", "gtop-k-butterfly"), ("gtopk-tree", "gtop-k"), ("topk", "top-k")],
)
def test_names_of_sparse_compressions(name: str, algorithm: str) -> None:
    config = TrainingConfig.of("resnet20", "digits", compression=name, density=0.01)
    recipe = config.recipe(7)
    assert isinstance(recipe, Recipe)
    assert (recipe.algorithm, recipe.warmup_steps, config.device) == (algorithm, 0, "cpu")
