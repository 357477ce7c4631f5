"""Data sets are found by name, and read from image folders and texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from syncline.errors import FileError, UserError
from syncline.lab.training.data import FOLDERS, default_data, load_images, load_text
from syncline.lab.training.data.imagefolder import load
from syncline.lab.training.data.text import PTB_FILES, load_help_text, load_ptb
from syncline.lab.training.models import MODELS, ImageModel, TextModel

RESNET20, LSTM = MODELS["resnet20"], MODELS["lstm"]
assert isinstance(RESNET20, ImageModel)
assert isinstance(LSTM, TextModel)

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
    train = load(folder, RESNET20).train
    first, again, other = (train.batch(torch.arange(2), augment_seed=s).inputs for s in (1, 1, 2))
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


def test_help_text_is_split_in_order() -> None:
    data = load_help_text(Path())
    length = len(data.train) + len(data.validation)
    assert length > 300_000  # a few letters more or less in every version of Python
    assert len(data.validation) == int(length * 0.1)
    both = torch.cat([data.train, data.validation])
    assert both.unique().tolist() == list(range(data.vocabulary))
    assert data.test is None


def write(folder: Path, train: str, valid: str = "a b\n", test: str = "b\n") -> Path:
    for name, content in zip(PTB_FILES, (train, valid, test), strict=True):
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def test_ptb_numbers_the_training_words(tmp_path: Path) -> None:
    data = load_ptb(write(tmp_path, " b <unk> a \n a\n", "a zebra\n"))
    words = ["<eos>", "<unk>", "a", "b"]
    assert data.vocabulary == 4
    assert [words[n] for n in data.train] == ["b", "<unk>", "a", "<eos>", "a", "<eos>"]
    assert [words[n] for n in data.validation] == ["a", "<unk>", "<eos>"]
    assert data.test is not None
    assert [words[n] for n in data.test] == ["b", "<eos>"]


def test_ptb_names_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path, "a b\n", "a zebra\n")
    with pytest.raises(FileError, match=r"ptb.valid.txt: the word 'zebra' is not in ptb.train"):
        load_ptb(tmp_path)
    write(tmp_path, "a b\n", test="\n\n")
    with pytest.raises(FileError, match=r"ptb.test.txt: expected words"):
        load_ptb(tmp_path)
    (tmp_path / "ptb.valid.txt").write_bytes(b"a \xff b")
    with pytest.raises(FileError, match=r"ptb.valid.txt: expected UTF-8 text; byte 2 is not"):
        load_ptb(tmp_path)
    (tmp_path / "ptb.train.txt").unlink()
    with pytest.raises(FileError, match=r"ptb.train.txt: no such file; expected ptb.train.txt, "):
        load_ptb(tmp_path)


def test_unknown_data_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        load_images("cifar", None, RESNET20)


def test_every_model_has_data_at_hand() -> None:
    assert not FOLDERS.keys() & {default_data(model) for model in MODELS.values()}


def test_the_wrong_kind_of_data_names_the_right_ones() -> None:
    with pytest.raises(UserError, match=r"'text' holds text, .* images: digits, cifar10, imagef"):
        load_images("text", None, RESNET20)
    with pytest.raises(UserError, match=r"'digits' holds images, .* text: text, ptb"):
        load_text("digits", None, LSTM)


def test_the_folder_must_be_named_exist_and_be_wanted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"name it with --data-dir; it must hold data_batch_1.bin"):
        load_images("cifar10", None, RESNET20)
    with pytest.raises(FileError, match=r"gone: expected the folder .* found nothing"):
        load_images("cifar10", str(tmp_path / "gone"), RESNET20)
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="found a file"):
        load_text("ptb", str(tmp_path / "file"), LSTM)
    with pytest.raises(UserError, match="is read from no folder"):
        load_images("digits", str(tmp_path), RESNET20)
