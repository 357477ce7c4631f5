"""Images in memory, their augmentation, and two data sets: CIFAR-10 and digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.errors import FileError, UserError
from syncline.lab.training.data.sampling import Batch, generator
from syncline.lab.training.models import ImageModel

CHANNELS = 3  # channels that every model takes


class ImageSplit(Protocol):
    """The training or the test part of a data set of images."""

    def __len__(self) -> int:
        """Return the number of images."""

    def batch(self, indices: Tensor, *, augment_seed: int | None) -> Batch:
        """Return the images of ``indices``, (N,), int64; with a seed they are augmented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageData:
    """A data set of labelled images with three channels, all of one size."""

    image_size: int
    classes: int
    train: ImageSplit
    test: ImageSplit
    decodes: bool = False  # whether batches are read from files, so that prefetching pays


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryImages:
    """A split whose images are one tensor; every batch is normalised and fitted to the model."""

    pixels: Tensor  # (N, channels, size, size), uint8; the one channel of grey images is tripled
    labels: Tensor  # (N,), int64
    mean: Tensor  # (channels,): subtracted from the pixels, in their unit
    deviation: Tensor  # (channels,): divides the difference
    enlarge: int = 1  # each pixel becomes a square of this many pixels a side
    crop_padding: int = 0  # pixels of padding a side before training images are cropped at random
    flip: bool = False  # whether half of the training images are mirrored

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, *, augment_seed: int | None) -> Batch:
        """Return the images of ``indices``; see ``ImageSplit.batch``."""
        images = self.pixels[indices]
        if augment_seed is not None:
            random = generator(augment_seed)
            if self.crop_padding:
                images = random_crops(images, self.crop_padding, random)
            if self.flip:
                images = random_flips(images, random)
        shape = (1, -1, 1, 1)
        inputs = (images.float() - self.mean.view(shape)) / self.deviation.view(shape)
        if self.enlarge > 1:
            inputs = inputs.repeat_interleave(self.enlarge, 2).repeat_interleave(self.enlarge, 3)
        if inputs.shape[1] == 1:
            inputs = inputs.repeat(1, CHANNELS, 1, 1)
        return Batch(inputs, self.labels[indices])


Labelled = tuple[Tensor, Tensor]  # pixels (N, channels, size, size), uint8; labels (N,), int64


def _in_memory(
    train: Labelled, test: Labelled, model: ImageModel, *, classes: int, **look: Any
) -> ImageData:
    """Return data whose images are enlarged by a whole factor, as far as the model needs."""
    image_size = train[0].shape[-1]
    enlarge = max(1, -(-model.smallest_image // image_size))
    first, second = (
        MemoryImages(pixels=pixels, labels=labels, enlarge=enlarge, **look)
        for pixels, labels in (train, test)
    )
    return ImageData(image_size=image_size * enlarge, classes=classes, train=first, test=second)


def random_crops(images: Tensor, padding: int, random: torch.Generator) -> Tensor:
    """Shift each image, (N, channels, H, W), by up to ``padding`` pixels, filling with zeros."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top = torch.randint(2 * padding + 1, (count, 1), generator=random)
    left = torch.randint(2 * padding + 1, (count, 1), generator=random)
    rows = (top + torch.arange(height))[:, :, None]
    columns = (left + torch.arange(width))[:, None, :]
    # Advanced indices on both sides of the sliced channels come first: (N, H, W, channels).
    crops = padded[torch.arange(count)[:, None, None], :, rows, columns]
    return crops.permute(0, 3, 1, 2)


def random_flips(images: Tensor, random: torch.Generator) -> Tensor:
    """Mirror each image, left to right, with probability one half."""
    flip = torch.rand(len(images), generator=random) < 0.5
    return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)


CIFAR10_IMAGE_SIZE = 32
CIFAR10_CLASSES = 10
RECORD_BYTES = 1 + CHANNELS * CIFAR10_IMAGE_SIZE * CIFAR10_IMAGE_SIZE
"""A label and the red, green and blue planes, row by row: 3,073 bytes."""
RECORDS_PER_FILE = 10_000

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
CIFAR10_FILES = f"{TRAIN_FILES[0]} to {TRAIN_FILES[-1]} and {TEST_FILE}"

CIFAR10_MEAN = (125.31, 122.95, 113.87)  # of the training images, by channel
CIFAR10_DEVIATION = (62.99, 62.09, 66.70)


def read_records(path: Path, *, records: int) -> tuple[Tensor, Tensor]:
    """Return a file's pixels, (records, 3, 32, 32), uint8, and labels, (records,), int64."""
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
    wrong = torch.nonzero(labels >= CIFAR10_CLASSES).flatten()
    if len(wrong):
        first = int(wrong[0])
        raise FileError(
            f"{path}: record {first} (byte {first * RECORD_BYTES}): expected a label from 0 to "
            f"{CIFAR10_CLASSES - 1}, found {int(labels[first])}"
        )
    return table[:, 1:].reshape(records, CHANNELS, CIFAR10_IMAGE_SIZE, CIFAR10_IMAGE_SIZE), labels


def load_cifar10(folder: Path, model: ImageModel) -> ImageData:
    """Load CIFAR-10; training images are padded by 4, cropped and mirrored at random.

    Source: the binary version of https://www.cs.toronto.edu/~kriz/cifar.html.
    """
    parts = [read_records(folder / name, records=RECORDS_PER_FILE) for name in TRAIN_FILES]
    return _in_memory(
        (torch.cat([pixels for pixels, _ in parts]), torch.cat([labels for _, labels in parts])),
        read_records(folder / TEST_FILE, records=RECORDS_PER_FILE),
        model,
        classes=CIFAR10_CLASSES,
        mean=torch.tensor(CIFAR10_MEAN),
        deviation=torch.tensor(CIFAR10_DEVIATION),
        crop_padding=4,
        flip=True,
    )


DIGITS_CLASSES = 10
TEST_FRACTION = 0.2
SPLIT_SEED = 0  # every run has the same test images, whatever its own seed


def load_digits(_folder: Path, model: ImageModel) -> ImageData:
    """Load 1,797 handwritten digits, scanned at 8x8, which come with scikit-learn.

    They are split 80/20 so that every digit is as frequent in both parts, and enlarged as far as
    the model needs.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (1998), UCI.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "data set 'digits' comes with scikit-learn, which is not installed; "
            "install it with 'pip install scikit-learn'"
        ) from None
    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).to(torch.uint8)[:, None]
    labels = torch.from_numpy(bunch.target).long()

    random = generator(SPLIT_SEED)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(DIGITS_CLASSES):
        places = torch.nonzero(labels == digit).flatten()
        shuffled = places[torch.randperm(len(places), generator=random)]
        test[shuffled[: round(len(places) * TEST_FRACTION)]] = True

    train_pixels = pixels[~test].float()
    return _in_memory(
        (pixels[~test], labels[~test]),
        (pixels[test], labels[test]),
        model,
        classes=DIGITS_CLASSES,
        mean=train_pixels.mean().view(1),
        deviation=train_pixels.std().view(1),
        crop_padding=1,
    )
