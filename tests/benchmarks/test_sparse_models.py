"""The models of the gTop-k paper's speed tables."""

from __future__ import annotations

import pytest
from benchmarks.sparse_models import PAPER


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        # As torchvision counts them; ResNet-20 as its authors: 0.27 million.
        ("vgg16", 138_357_544),
        ("resnet20", 269_722),
        ("alexnet", 61_100_840),
        ("resnet50", 25_557_032),
    ],
)
def test_sizes_and_times(name: str, elements: int) -> None:
    published = PAPER[name]
    assert published.model.elements == elements
    assert published.profile().computation_s == pytest.approx(published.iteration_s)
