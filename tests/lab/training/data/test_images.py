"""Digits, CIFAR-10, and what is made of images: what is read is what was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from syncline.errors import FileError
from syncline.lab.training.data import images, load_images
from syncline.lab.training.data.images import (
    RECORD_BYTES,
    TEST_FILE,
    TRAIN_FILES,
    ImageData,
    MemoryImages,
    load_cifar10,
    random_crops,
    random_flips,
    read_records,
)
from syncline.lab.training.data.sampling import generator
from syncline.lab.training.models import MODELS, ImageModel
from tests.words import assert_tells

RESNET20 = MODELS["resnet20"]
assert isinstance(RESNET20, ImageModel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cifar10")


def written(path: Path, labels: list[int], pixels: np.ndarray) -> Path:
    rows = [bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True)]
    path.write_bytes(b"".join(rows))
    return path


def digits(model: str = "resnet20") -> ImageData:
    return load_images("digits", None, MODELS[model])  # type: ignore[arg-type]


@given(
    st.integers(1, 4).flatmap(
        lambda count: st.tuples(
            st.lists(st.integers(0, 9), min_size=count, max_size=count),
            nps.arrays(np.uint8, (count, 3, 32, 32)),
        )
    )
)
def test_records_are_read_as_written(folder: Path, records: tuple[list[int], np.ndarray]) -> None:
    labels, pixels = records
    path = written(folder / "x.bin", labels, pixels)
    read_pixels, read_labels = read_records(path, records=len(labels))
    assert read_labels.tolist() == labels
    assert torch.equal(read_pixels, torch.from_numpy(pixels))


@given(size=st.integers(0, 3 * RECORD_BYTES))
def test_a_file_of_another_size_is_refused_with_both_sizes(folder: Path, size: int) -> None:
    assume(size != 2 * RECORD_BYTES)
    path = folder / "short.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(FileError) as caught:
        read_records(path, records=2)
    facts = (str(path), f"expected {2 * RECORD_BYTES} bytes", f"found {size};")
    assert_tells(str(caught.value), *facts)


@given(wrong=st.integers(10, 255), place=st.integers(0, 2))
def test_a_label_above_nine_is_refused_with_its_place(folder: Path, wrong: int, place: int) -> None:
    labels = [1, 2, 3]
    labels[place] = wrong
    path = written(folder / "label.bin", labels, np.zeros((3, 3, 32, 32), np.uint8))
    expected = rf"label.bin: record {place} .*from 0 to 9, found {wrong}$"
    with pytest.raises(FileError, match=expected):
        read_records(path, records=3)


def test_load_reads_six_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "RECORDS_PER_FILE", 4)
    random = np.random.default_rng(0)
    for number, name in enumerate((*TRAIN_FILES, TEST_FILE)):
        pixels = random.integers(0, 256, (4, 3, 32, 32), np.uint8)
        written(tmp_path / name, [number] * 4, pixels)
    data = load_cifar10(tmp_path, RESNET20)
    assert (len(data.train), len(data.test)) == (20, 4)
    batch = data.train.batch(torch.tensor([0, 5, 19]), augment_seed=3)
    assert batch.targets.tolist() == [0, 1, 4]
    assert batch.inputs.shape == (3, 3, 32, 32)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(FileError, match=r"data_batch_3.bin: no such file; .*test_batch.bin"):
        load_cifar10(tmp_path, RESNET20)


def test_split_is_stratified_disjoint_and_fixed() -> None:
    train, test = digits().train, digits().test
    assert isinstance(train, MemoryImages)
    assert isinstance(test, MemoryImages)
    assert len(train) + len(test) == 1797
    for digit in range(10):
        share = (test.labels == digit).sum() / ((train.labels == digit).sum() + 36)
        assert 0.18 < share < 0.22
    every = torch.arange(len(test))
    again, once = (split.batch(every, augment_seed=None) for split in (digits().test, test))
    assert torch.equal(again.inputs, once.inputs)
    assert int(train.pixels.max()) == 16


@pytest.mark.parametrize(("name", "size"), [("resnet20", 8), ("vgg16", 32), ("alexnet", 32)])
def test_images_are_enlarged_as_the_model_needs(name: str, size: int) -> None:
    data = digits(name)
    batch = data.test.batch(torch.arange(5), augment_seed=None)
    assert data.image_size == size
    assert batch.inputs.shape == (5, 3, size, size)
    assert data.classes == 10


def test_training_images_are_normalised() -> None:
    train = digits().train
    inputs = train.batch(torch.arange(len(train)), augment_seed=None).inputs
    assert abs(float(inputs.mean())) < 1e-3
    assert abs(float(inputs.std()) - 1) < 1e-3


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    images = torch.arange(1, 1 + 20 * 2 * 5 * 5, dtype=torch.int32).view(20, 2, 5, 5)
    crops = random_crops(images, 2, generator(1))
    assert crops.shape == images.shape
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    places = set()
    for image, crop in zip(padded, crops, strict=True):
        fitting = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(image[:, top : top + 5, left : left + 5], crop)
        ]
        assert len(fitting) == 1
        places.update(fitting)
    assert len(places) > 5


def test_a_flip_mirrors_about_half_of_the_images() -> None:
    images = torch.rand(200, 1, 2, 3)
    flipped = random_flips(images, generator(1))
    mirrored = [torch.equal(f, i.flip(2)) for f, i in zip(flipped, images, strict=True)]
    kept = [torch.equal(f, i) for f, i in zip(flipped, images, strict=True)]
    assert all(m != k for m, k in zip(mirrored, kept, strict=True))
    assert 70 < sum(mirrored) < 130


def test_batches_are_fitted_and_varied_only_when_asked() -> None:
    split = MemoryImages(
        pixels=torch.randint(0, 255, (6, 1, 4, 4), dtype=torch.uint8),
        labels=torch.arange(6),
        mean=torch.tensor([100.0]),
        deviation=torch.tensor([50.0]),
        enlarge=2,
        crop_padding=1,
        flip=True,
    )
    indices = torch.tensor([4, 1])
    plain = split.batch(indices, augment_seed=None)
    assert plain.inputs.shape == (2, 3, 8, 8)
    assert plain.targets.tolist() == [4, 1]
    expected = (split.pixels[indices].float() - 100) / 50
    for channel in range(3):
        torch.testing.assert_close(plain.inputs[:, channel, 1::2, ::2], expected[:, 0])
    first, again, other = (split.batch(indices, augment_seed=s).inputs for s in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
