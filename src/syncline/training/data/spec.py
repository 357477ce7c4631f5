"""What a data set gives to the training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from syncline.training.models.spec import ImageModel

__all__ = [
    "Batch",
    "DataSpec",
    "ImageData",
    "ImageDataSpec",
    "ImageSplit",
    "TextData",
    "TextDataSpec",
]


class Batch(NamedTuple):
    """Inputs and targets of a forward pass."""

    inputs: Tensor
    """Images: (N, 3, size, size), float32. Text: (N, T), int64."""
    targets: Tensor
    """Images: (N,), int64. Text: (N, T), int64."""


class ImageSplit(Protocol):
    """The training or the test half of a data set of images."""

    @property
    def decodes(self) -> bool:
        """Whether making a batch is slow (reads files), so that it pays to make it ahead."""

    def __len__(self) -> int:
        """Return the number of images."""

    def batch(self, indices: Tensor, *, augment_seed: int | None) -> Batch:
        """Return the images of ``indices``, (N,), int64.

        ``augment_seed`` seeds random changes of the images; None changes nothing.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageData:
    """A data set of labelled images with three channels, all of one size."""

    image_size: int
    classes: int
    train: ImageSplit
    test: ImageSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class TextData:
    """A text as one stream of tokens a split; each is (length,), int64."""

    vocabulary: int
    train: Tensor
    validation: Tensor
    test: Tensor | None
    """Read once, after training; None where the data set has no such split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDataSpec:
    """How to load a data set of images."""

    name: str
    load: Callable[[Path, ImageModel], ImageData]
    """(folder, model) -> data in a shape that the model takes."""
    folder: str | None = None
    """What ``--data-dir`` must hold, for messages; None where the data need no folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDataSpec:
    """How to load a text; see :class:`ImageDataSpec`."""

    name: str
    load: Callable[[Path], TextData]
    folder: str | None = None


DataSpec = ImageDataSpec | TextDataSpec
