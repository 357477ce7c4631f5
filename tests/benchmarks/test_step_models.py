"""The models of ``benchmarks.step_time`` are the published ones."""

from __future__ import annotations

import pytest
from benchmarks.step_models import FORWARD_SHARE, MODELS, NOMINAL_S, profile_of

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
def test_tensors_are_those_published(name: str) -> None:
    elements, tensors, _ = PUBLISHED[name]
    model = MODELS[name]
    assert model.elements == elements
    assert len(model.shapes()) == tensors
    gradients = profile_of(model).gradients
    assert sum(g.elements for g in gradients) == elements
    assert len(gradients) == tensors


@pytest.mark.parametrize("name", PUBLISHED)
def test_multiply_adds_are_those_published(name: str) -> None:
    # Elementwise layers are counted here and not there; they are at most 2 %.
    assert MODELS[name].multiply_adds / 1e9 == pytest.approx(PUBLISHED[name][2], rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_blocks_hold_every_layer_once_in_order(name: str) -> None:
    model = MODELS[name]
    assert [layer for block in model.blocks() for layer in block] == [x.name for x in model.layers]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_first_needed_is_the_last_ready(name: str) -> None:
    profile = profile_of(MODELS[name])
    needs = [g.needed_by for g in profile.gradients]
    assert needs == sorted(needs, key=lambda need: -(need or 0))
    assert profile.gradients[-1].needed_by == 0


def test_resnet50_computes_for_the_nominal_time() -> None:
    profile = profile_of(MODELS["resnet50"])
    assert profile.phase_s("forward") == pytest.approx(0.4)
    assert profile.phase_s("backward") == pytest.approx(0.8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_compute_is_in_proportion_to_bytes(name: str) -> None:
    profile = profile_of(MODELS[name], scale=0.1)
    whole_s = 0.1 * NOMINAL_S * PUBLISHED[name][0] / PUBLISHED["resnet50"][0]
    assert profile.phase_s("forward", "backward") == pytest.approx(whole_s)
    assert profile.phase_s("forward") == pytest.approx(whole_s * FORWARD_SHARE)
