"""The binary version of CIFAR-10: what is read is what was written; all else is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from syncline.errors import FileError
from syncline.lab.training.data import images
from syncline.lab.training.data.images import (
    RECORD_BYTES,
    TEST_FILE,
    TRAIN_FILES,
    load_cifar10,
    read_records,
)
from syncline.lab.training.models import MODELS, ImageModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cifar10")


def written(path: Path, labels: list[int], pixels: np.ndarray) -> Path:
    rows = [bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True)]
    path.write_bytes(b"".join(rows))
    return path


RECORDS = st.integers(1, 4).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 9), min_size=count, max_size=count),
        nps.arrays(np.uint8, (count, 3, 32, 32)),
    )
)

RESNET20 = MODELS["resnet20"]
assert isinstance(RESNET20, ImageModel)


@settings(max_examples=40, deadline=None)
@given(records=RECORDS)
def test_records_are_read_as_written(folder: Path, records: tuple[list[int], np.ndarray]) -> None:
    labels, pixels = records
    path = written(folder / "x.bin", labels, pixels)
    read_pixels, read_labels = read_records(path, records=len(labels))
    assert read_labels.tolist() == labels
    assert torch.equal(read_pixels, torch.from_numpy(pixels))


@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 3 * RECORD_BYTES))
def test_a_file_of_another_size_is_refused_with_both_sizes(folder: Path, size: int) -> None:
    path = folder / "short.bin"
    path.write_bytes(bytes(size))
    if size == 2 * RECORD_BYTES:
        read_records(path, records=2)
        return
    with pytest.raises(FileError) as caught:
        read_records(path, records=2)
    assert str(path) in str(caught.value)
    assert f"expected {2 * RECORD_BYTES} bytes" in str(caught.value)
    assert f"found {size};" in str(caught.value)


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
