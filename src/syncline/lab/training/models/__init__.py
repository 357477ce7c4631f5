"""The papers' models, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from syncline.errors import require_known
from syncline.lab.training.models.language import (
    WINDOW,
    LstmLanguageModel,
    TransformerLanguageModel,
)
from syncline.lab.training.models.vision import AlexNet, GoogLeNet, ResNet20, ResNet50, Vgg16

__all__ = ["MODELS", "ImageModel", "ModelSpec", "TextModel", "model_named"]


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A classifier of square images with three channels."""

    name: str
    build: Callable[[int, int], nn.Module]
    """(image_size, classes) -> module; (N, 3, image_size, image_size) -> (N, classes) logits."""
    smallest_image: int  # pixels a side to which smaller images are enlarged, by a whole factor
    folder_image: int  # pixels a side to which the images of a folder are cropped


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model of the next token of a text."""

    name: str
    build: Callable[[int], nn.Module]
    """(vocabulary) -> module; (N, T) tokens -> (N, T, vocabulary) logits. With ``carries_state``
    the module takes ``(tokens, state)`` and returns ``(logits, state)``."""
    carries_state: bool  # whether the state after one window is the start of the next
    window: int  # tokens a training window: the length of back-propagation through time


ModelSpec = ImageModel | TextModel


MODELS: dict[str, ModelSpec] = {
    model.name: model
    for model in (
        ImageModel("resnet20", lambda _, classes: ResNet20(classes), 8, 32),
        ImageModel("vgg16", lambda _, classes: Vgg16(classes), 32, 32),
        ImageModel("alexnet", AlexNet, 32, 224),
        ImageModel("googlenet", lambda _, classes: GoogLeNet(classes), 32, 224),
        ImageModel("resnet50", lambda _, classes: ResNet50(classes), 32, 224),
        TextModel("lstm", LstmLanguageModel, carries_state=True, window=35),
        TextModel("transformer", TransformerLanguageModel, carries_state=False, window=WINDOW),
    )
}


def model_named(name: str) -> ModelSpec:
    """Return the model of that name, or raise a UserError that names the nearest."""
    require_known("model", name, MODELS)
    return MODELS[name]
