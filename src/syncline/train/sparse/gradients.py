"""Gradients as they are exchanged, and which parameters of a model have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from syncline.errors import UserError


class NamedGradient(NamedTuple):
    """A parameter's gradient, contiguous float32 on the CPU or a GPU."""

    name: str
    values: Tensor  # of shape (elements,); becomes the average


def flat(values: Tensor) -> Tensor:
    """Return a gradient in its memory order, of shape (elements,), without a copy."""
    # view(-1) would fail for channels-last gradients.
    return values.as_strided((values.numel(),), (1,), values.storage_offset())


def shaped(values: Tensor, like: Tensor) -> Tensor:
    """Undo :func:`flat`: return values in the shape and strides of ``like``, without a copy."""
    return values.as_strided(like.shape, like.stride())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that is trained, inside DDP or not."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        module: nn.Module = model.module
        return module
    return model


def require_exchangeable(parameters: Mapping[str, Tensor], model: nn.Module | None = None) -> None:
    """Raise UserError if there are no parameters, or the gradients of one cannot be compressed."""
    for name, module in model.named_modules() if model is not None else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(
                f"module {name!r} makes sparse gradients (sparse=True), from which nothing can be "
                "selected; make it with sparse=False, or leave the hook out"
            )
    if not parameters:
        raise UserError("the model has no parameters that require gradients")
    device = device_of(parameters)
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 or parameter.device.type not in ("cpu", "cuda"):
            raise UserError(
                f"parameter {name!r} is {parameter.dtype} on {parameter.device}; sparse exchange "
                "needs torch.float32 on the CPU or on a GPU (cuda)"
            )
        if parameter.device != device:
            raise UserError(
                f"parameter {name!r} is on {parameter.device}, the first is on {device}; sparse "
                "exchange needs all of a rank's parameters on one device"
            )
        if parameter.numel() >= 2**32:
            raise UserError(
                f"parameter {name!r} has {parameter.numel()} elements; at most 2^32 - 1 can be "
                "selected from"
            )


def device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    """Return the device of the first of them, or the CPU if there are none."""
    return next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
