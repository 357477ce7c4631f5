"""The models of ``benchmarks.step_time`` are the published ones."""

from __future__ import annotations

import pytest
from benchmarks.step_models import MODELS, profile_of

PUBLISHED = {
    # name: (elements, tensors, multiply-adds of the convolutions and products, in units of 1e9)
    "resnet50": (25_557_032, 161, 4.09),
    "resnet152": (60_192_808, 467, 11.51),
    "densenet201": (20_013_928, 604, 4.29),
    "vgg16": (138_357_544, 32, 15.47),
    "bert": (109_482_240, 199, 11.17),
    "lstm": (66_034_000, 11, 0.051),
}
"""As torchvision's documentation gives them (``num_params`` and ``_ops`` of the weights), and as
the papers and torch's modules do for the last two."""


def test_every_model_is_checked() -> None:
    assert set(MODELS) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_and_layers_are_those_published(name: str) -> None:
    elements, tensors, multiply_adds = PUBLISHED[name]
    model = MODELS[name]
    assert (model.elements, len(model.shapes())) == (elements, tensors)
    # Elementwise layers are counted here and not there; they are at most 2 %.
    assert model.multiply_adds / 1e9 == pytest.approx(multiply_adds, rel=0.02)
    assert [layer for block in model.blocks() for layer in block] == [x.name for x in model.layers]


@pytest.mark.parametrize("name", PUBLISHED)
def test_compute_is_in_proportion_to_bytes(name: str) -> None:
    """ResNet-50 computes for the nominal time. What is needed first is ready last."""
    elements, tensors, _ = PUBLISHED[name]
    profile = profile_of(MODELS[name], scale=0.1)
    whole_s = 0.12 * elements / PUBLISHED["resnet50"][0]
    assert profile.phase_s("forward") == pytest.approx(whole_s / 3)
    assert profile.phase_s("backward") == pytest.approx(whole_s * 2 / 3)
    assert sum(g.elements for g in profile.gradients) == elements
    needs = [g.needed_by or 0 for g in profile.gradients]
    assert needs == sorted(needs, reverse=True)
    assert (len(needs), needs[-1]) == (tensors, 0)
