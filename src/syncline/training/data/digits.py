"""1,797 handwritten digits, scanned at 8x8; they come with scikit-learn, so nothing is fetched.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (1998), UCI.
"""

from __future__ import annotations

from pathlib import Path

import torch

from syncline.errors import UserError
from syncline.training.data.images import MemoryImages, enlargement
from syncline.training.data.seeds import generator
from syncline.training.data.spec import ImageData, ImageDataSpec
from syncline.training.models.spec import ImageModel

__all__ = ["DATA", "load"]

IMAGE_SIZE = 8
CLASSES = 10
TEST_FRACTION = 0.2

SPLIT_SEED = 0
"""Fixes which images are for testing; runs with different seeds are tested on the same ones."""


def load(folder: Path, model: ImageModel) -> ImageData:  # noqa: ARG001
    """Load the digits, split 80/20 so that every digit is as frequent in both parts.

    Args:
        folder: not read.
        model: its needs say how far the images are enlarged.

    Raises:
        UserError: scikit-learn is not installed.
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
    for digit in range(CLASSES):
        places = torch.nonzero(labels == digit).flatten()
        shuffled = places[torch.randperm(len(places), generator=random)]
        test[shuffled[: round(len(places) * TEST_FRACTION)]] = True

    train_pixels = pixels[~test].float()
    enlarge = enlargement(model, IMAGE_SIZE)

    def split(chosen: torch.Tensor) -> MemoryImages:
        return MemoryImages(
            pixels=pixels[chosen],
            labels=labels[chosen],
            mean=train_pixels.mean().view(1),
            deviation=train_pixels.std().view(1),
            enlarge=enlarge,
            crop_padding=1,
        )

    return ImageData(
        image_size=IMAGE_SIZE * enlarge,
        classes=CLASSES,
        train=split(~test),
        test=split(test),
    )


DATA = ImageDataSpec(
    name="digits",
    summary="1,797 scanned digits that come with scikit-learn (8x8, 10 classes)",
    folder=None,
    load=load,
)
