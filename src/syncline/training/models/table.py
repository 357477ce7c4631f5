"""The table of models by name."""

from __future__ import annotations

from syncline.errors import UserError, did_you_mean
from syncline.training.models import alexnet, lstm, resnet20, resnet50, transformer, vgg16
from syncline.training.models.spec import ModelSpec

__all__ = ["MODELS", "model_named"]

MODELS: dict[str, ModelSpec] = {
    module.MODEL.name: module.MODEL
    for module in (resnet20, vgg16, alexnet, resnet50, lstm, transformer)
}


def model_named(name: str) -> ModelSpec:
    """Return the model of that name.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    if name not in MODELS:
        hint = did_you_mean(name, MODELS)
        raise UserError(f"unknown model {name!r}{hint} (known: {', '.join(MODELS)})")
    return MODELS[name]
