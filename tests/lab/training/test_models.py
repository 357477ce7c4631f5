"""The models have the sizes of the literature and take the inputs that they say they take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.errors import UserError
from syncline.lab.training.models import MODELS, ImageModel, TextModel, model_named
from syncline.lab.training.models.vision import SMALLEST_FULL_IMAGE, BasicBlock, Vgg16

IMAGE_MODELS = [model for model in MODELS.values() if isinstance(model, ImageModel)]
TEXT_MODELS = [model for model in MODELS.values() if isinstance(model, TextModel)]


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "image_size", "classes", "expected"),
    [
        ("resnet20", 32, 10, 269_722),  # He et al., table 6: 0.27 M
        ("vgg16", 32, 10, 14_724_042),  # the usual 32x32 form: 14.7 M
        ("alexnet", 224, 1000, 61_100_840),  # the single-tower form: 61.1 M
        ("googlenet", 224, 1000, 6_998_552),
        ("resnet50", 224, 1000, 25_557_032),  # 25.56 M
    ],
)
def test_image_models_as_published(name: str, image_size: int, classes: int, expected: int) -> None:
    model = MODELS[name]
    assert isinstance(model, ImageModel)
    with torch.device("meta"):
        assert parameters(model.build(image_size, classes)) == expected


def test_a_narrower_vgg16_is_as_deep() -> None:
    full, narrow = Vgg16(10), Vgg16(10, width=0.25)
    assert len(list(narrow.parameters())) == len(list(full.parameters()))
    # Both channels of a convolution are a quarter, but for the image's three.
    assert parameters(narrow) == pytest.approx(parameters(full) / 16, rel=0.01)
    assert narrow(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_lstm_has_the_size_of_its_formula() -> None:
    # A tied embedding of 10,000 words, an output bias, and two layers of four gates.
    hidden = 650
    layer = 4 * hidden * (2 * hidden) + 2 * 4 * hidden
    with torch.device("meta"):
        assert parameters(MODELS["lstm"].build(10_000)) == 10_000 * hidden + 10_000 + 2 * layer  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize("model", IMAGE_MODELS, ids=lambda m: m.name)
def test_image_model_takes_images_of_every_size_it_may_get(model: ImageModel) -> None:
    for size in (model.smallest_image, 32, 64, SMALLEST_FULL_IMAGE, model.folder_image):
        with torch.device("meta"):
            module = model.build(size, 10).eval()
            assert module(torch.empty(2, 3, size, size)).shape == (2, 10)


def logits(model: TextModel, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    found = module(tokens, None)[0] if model.carries_state else module(tokens)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("model", TEXT_MODELS, ids=lambda m: m.name)
def test_text_model_returns_logits_and_trains_every_parameter(model: TextModel) -> None:
    module = model.build(50)
    tokens = torch.randint(50, (3, model.window))
    found = logits(model, module, tokens)
    assert found.shape == (3, model.window, 50)
    found.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("model", TEXT_MODELS, ids=lambda m: m.name)
def test_text_model_does_not_look_ahead(model: TextModel) -> None:
    module = model.build(50).eval()
    tokens = torch.randint(50, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 50
    with torch.no_grad():
        before, after = (logits(model, module, each) for each in (tokens, changed))
    torch.testing.assert_close(before[0, :8], after[0, :8])
    assert not torch.allclose(before[0, 8:], after[0, 8:])


def test_lstm_state_joins_windows() -> None:
    module = MODELS["lstm"].build(50).eval()  # type: ignore[call-arg,arg-type]
    tokens = torch.randint(50, (2, 20))
    with torch.no_grad():
        whole, _ = module(tokens, None)
        first, state = module(tokens[:, :10], None)
        second, _ = module(tokens[:, 10:], state)
    torch.testing.assert_close(whole, torch.cat([first, second], 1))


def test_resnet20_shortcut_halves_and_pads_with_zeros() -> None:
    block = BasicBlock(2, 4, stride=2)
    nn.init.zeros_(block.bn2.weight)  # leaves the shortcut alone
    x = torch.rand(1, 2, 4, 4)
    y = block(x)
    assert y.shape == (1, 4, 2, 2)
    torch.testing.assert_close(y[:, 1:3], x[:, :, ::2, ::2])
    assert not y[:, [0, 3]].any()


@pytest.mark.parametrize("name", ["alexnet", "googlenet"])
def test_a_model_with_dropout_drops_in_training_alone(name: str) -> None:
    model = MODELS[name]
    assert isinstance(model, ImageModel)
    network = model.build(model.smallest_image, 10)
    images = torch.randn(2, 3, model.smallest_image, model.smallest_image)
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'resnet50'"):
        model_named("resnet-50")
