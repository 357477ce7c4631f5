"""The digits are split once and for all, and fitted to the model."""

from __future__ import annotations

import pytest
import torch

from syncline.lab.training.data import load_images
from syncline.lab.training.data.images import MemoryImages
from syncline.lab.training.models import MODELS, ImageModel


def image_model(name: str) -> ImageModel:
    model = MODELS[name]
    assert isinstance(model, ImageModel)
    return model


def test_split_is_stratified_disjoint_and_fixed() -> None:
    data = load_images("digits", None, image_model("resnet20"))
    train, test = data.train, data.test
    assert isinstance(train, MemoryImages)
    assert isinstance(test, MemoryImages)
    assert len(train) + len(test) == 1797
    for digit in range(10):
        share = (test.labels == digit).sum() / ((train.labels == digit).sum() + 36)
        assert 0.18 < share < 0.22
    again = load_images("digits", None, image_model("resnet20")).test
    assert isinstance(again, MemoryImages)
    assert torch.equal(test.pixels, again.pixels)
    assert int(train.pixels.max()) == 16


@pytest.mark.parametrize(("name", "size"), [("resnet20", 8), ("vgg16", 32), ("alexnet", 32)])
def test_images_are_enlarged_as_the_model_needs(name: str, size: int) -> None:
    data = load_images("digits", None, image_model(name))
    batch = data.test.batch(torch.arange(5), augment_seed=None)
    assert data.image_size == size
    assert batch.inputs.shape == (5, 3, size, size)
    assert data.classes == 10


def test_training_images_are_normalised() -> None:
    data = load_images("digits", None, image_model("resnet20"))
    inputs = data.train.batch(torch.arange(len(data.train)), augment_seed=None).inputs
    assert abs(float(inputs.mean())) < 1e-3
    assert abs(float(inputs.std()) - 1) < 1e-3
