"""Image folders are listed at once and decoded when a batch needs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from syncline.errors import FileError
from syncline.lab.training.data.imagefolder import load
from syncline.lab.training.models import MODELS, ImageModel

RESNET20 = MODELS["resnet20"]
assert isinstance(RESNET20, ImageModel)

COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 3), ("val", 2)):
        for name, colour in COLOURS.items():
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for number in range(count):
                suffix = ("png", "JPEG", "jpg")[number]
                Image.new("RGB", (50, 40), colour).save(place / f"{number}.{suffix}")
            (place / "notes.txt").write_text("not an image")
    return tmp_path


def test_classes_are_the_sorted_folders(folder: Path) -> None:
    data = load(folder, RESNET20)
    assert (data.classes, data.image_size) == (2, 32)
    assert (len(data.train), len(data.test)) == (6, 4)
    batch = data.test.batch(torch.tensor([0, 3]), augment_seed=None)
    assert batch.targets.tolist() == [0, 1]
    assert batch.inputs.shape == (2, 3, 32, 32)
    assert batch.inputs[0].amax((1, 2)).argmax() == 2  # blue
    assert batch.inputs[1].amax((1, 2)).argmax() == 0  # red


def test_training_windows_depend_on_the_seed_alone(folder: Path) -> None:
    image = Image.effect_noise((64, 48), 80).convert("RGB")
    image.save(folder / "train" / "blue" / "0.png")
    data = load(folder, RESNET20)
    first, again, other = (
        data.train.batch(torch.tensor([0, 1]), augment_seed=s).inputs for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("size", [(1, 1), (400, 3), (33, 32)])
def test_odd_shapes_are_scaled(folder: Path, size: tuple[int, int]) -> None:
    Image.new("L", size).save(folder / "train" / "blue" / "0.png")
    Image.new("L", size).save(folder / "val" / "blue" / "0.png")
    data = load(folder, RESNET20)
    for seed in (None, 0, 1):
        split = data.test if seed is None else data.train
        assert split.batch(torch.tensor([0]), augment_seed=seed).inputs.shape == (1, 3, 32, 32)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_a_broken_image_is_named(folder: Path, content: bytes) -> None:
    (folder / "train" / "red" / "1.JPEG").write_bytes(content)
    data = load(folder, RESNET20)
    with pytest.raises(FileError, match=r"red/1.JPEG: expected an image that Pillow can decode"):
        data.train.batch(torch.arange(6), augment_seed=0)


def test_a_truncated_image_is_named(folder: Path) -> None:
    path = folder / "train" / "red" / "2.jpg"
    Image.effect_noise((64, 48), 80).save(path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(FileError, match=r"red/2.jpg"):
        load(folder, RESNET20).train.batch(torch.arange(6), augment_seed=0)


def test_missing_or_foreign_folders_are_named(folder: Path) -> None:
    (folder / "val" / "green").mkdir()
    with pytest.raises(FileError, match=r"val/green: expected a class of .*train"):
        load(folder, RESNET20)
    with pytest.raises(FileError, match=r"nowhere/train: expected a folder"):
        load(folder / "nowhere", RESNET20)
    (folder / "empty" / "train" / "a").mkdir(parents=True)
    (folder / "empty" / "val" / "a").mkdir(parents=True)
    with pytest.raises(FileError, match=r"empty/train: expected images .*found none"):
        load(folder / "empty", RESNET20)
