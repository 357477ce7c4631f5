"""CIFAR-10 in its binary version. Source: https://www.cs.toronto.edu/~kriz/cifar.html."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from syncline.errors import FileError
from syncline.training.data.images import MemoryImages, enlargement
from syncline.training.data.spec import ImageData, ImageDataSpec
from syncline.training.models.spec import ImageModel

__all__ = ["DATA", "RECORD_BYTES", "load", "read_records"]

IMAGE_SIZE = 32
CHANNELS = 3
CLASSES = 10

RECORD_BYTES = 1 + CHANNELS * IMAGE_SIZE * IMAGE_SIZE
"""A label and the red, green and blue planes, row by row: 3,073 bytes."""

RECORDS_PER_FILE = 10_000

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"

MEAN = (125.31, 122.95, 113.87)
"""Of the training images, by channel."""
DEVIATION = (62.99, 62.09, 66.70)


def read_records(path: Path, *, records: int) -> tuple[Tensor, Tensor]:
    """Read one file of the binary version.

    Args:
        path: the file.
        records: how many images it must hold.

    Returns:
        Pixels, (records, 3, 32, 32), uint8; labels, (records,), int64.

    Raises:
        FileError: the file is missing, of another size, or has a label above 9.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileError(
            f"{path}: no such file; CIFAR-10's binary version has {', '.join(TRAIN_FILES)} "
            f"and {TEST_FILE}"
        ) from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    expected = records * RECORD_BYTES
    if len(content) != expected:
        raise FileError(
            f"{path}: expected {expected} bytes ({records} records of {RECORD_BYTES}), found "
            f"{len(content)}; it is truncated or not of the binary version of CIFAR-10"
        )
    table = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(records, RECORD_BYTES)
    labels = table[:, 0].long()
    wrong = torch.nonzero(labels >= CLASSES).flatten()
    if len(wrong):
        first = int(wrong[0])
        raise FileError(
            f"{path}: record {first} (byte {first * RECORD_BYTES}): expected a label from 0 to "
            f"{CLASSES - 1}, found {int(labels[first])}"
        )
    pixels = table[:, 1:].reshape(records, CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    return pixels, labels


def load(folder: Path, model: ImageModel) -> ImageData:
    """Load CIFAR-10; training images are padded by 4, cropped and mirrored at random.

    Raises:
        FileError: a file is missing, of another size, or has a label above 9.
    """
    parts = [read_records(folder / name, records=RECORDS_PER_FILE) for name in TRAIN_FILES]
    test = read_records(folder / TEST_FILE, records=RECORDS_PER_FILE)
    enlarge = enlargement(model, IMAGE_SIZE)

    def split(pixels: Tensor, labels: Tensor) -> MemoryImages:
        return MemoryImages(
            pixels=pixels,
            labels=labels,
            mean=torch.tensor(MEAN),
            deviation=torch.tensor(DEVIATION),
            enlarge=enlarge,
            crop_padding=4,
            flip=True,
        )

    return ImageData(
        image_size=IMAGE_SIZE * enlarge,
        classes=CLASSES,
        train=split(torch.cat([p for p, _ in parts]), torch.cat([label for _, label in parts])),
        test=split(*test),
    )


DATA = ImageDataSpec(
    name="cifar10",
    summary="CIFAR-10, binary version (32x32, 10 classes)",
    folder=f"{TRAIN_FILES[0]} to {TRAIN_FILES[-1]} and {TEST_FILE} (the binary version)",
    load=load,
)
