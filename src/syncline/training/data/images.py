"""Images that lie in memory, and how they are fitted to a model and varied in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.training.data.seeds import generator
from syncline.training.data.spec import Batch
from syncline.training.models.spec import ImageModel

__all__ = ["MemoryImages", "enlargement", "random_crops", "random_flips"]

CHANNELS = 3
"""What every model takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryImages:
    """A split whose images are one tensor; every batch is normalised and fitted to the model."""

    pixels: Tensor
    """(N, channels, size, size), uint8; grey images have one channel, which is tripled."""
    labels: Tensor
    """(N,), int64."""
    mean: Tensor
    """(channels,): subtracted from the pixels, in their unit."""
    deviation: Tensor
    """(channels,): divides what is left."""
    enlarge: int = 1
    """Each pixel becomes a square of this many pixels a side."""
    crop_padding: int = 0
    """Training images are cropped at random after this many pixels of padding on each side."""
    flip: bool = False
    """Whether half of the training images are mirrored."""

    @property
    def decodes(self) -> bool:
        """False: the images are at hand."""
        return False

    def __len__(self) -> int:
        """Return the number of images."""
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


def enlargement(model: ImageModel, image_size: int) -> int:
    """Return the whole factor by which images must grow to be large enough for the model."""
    return max(1, -(-model.smallest_image // image_size))


def random_crops(images: Tensor, padding: int, random: torch.Generator) -> Tensor:
    """Shift each image by up to ``padding`` pixels, filling with zeros.

    Args:
        images: (N, channels, H, W).
        padding: pixels added on each side before a window of the old size is cut out.
        random: gives the place of each window.
    """
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
