"""Random crops and flips move whole images and depend on their generator alone."""

from __future__ import annotations

import torch

from syncline.lab.training.data.images import MemoryImages, random_crops, random_flips
from syncline.lab.training.data.sampling import generator


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
