"""The papers' models, by name."""

from __future__ import annotations

from syncline.errors import require_known
from syncline.training.models.language import LSTM, TRANSFORMER
from syncline.training.models.spec import ModelSpec
from syncline.training.models.vision import ALEXNET, GOOGLENET, RESNET20, RESNET50, VGG16

__all__ = ["MODELS", "model_named"]

MODELS: dict[str, ModelSpec] = {
    model.name: model
    for model in (RESNET20, VGG16, ALEXNET, GOOGLENET, RESNET50, LSTM, TRANSFORMER)
}


def model_named(name: str) -> ModelSpec:
    """Return the model of that name.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    require_known("model", name, MODELS)
    return MODELS[name]
