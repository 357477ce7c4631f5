"""What the training loop must know of a model before it builds one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

__all__ = ["ImageModel", "ModelSpec", "TextModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel:
    """A classifier of square images with three channels."""

    name: str
    build: Callable[[int, int], nn.Module]
    """(image_size, classes) -> module; (N, 3, image_size, image_size) -> (N, classes) logits."""
    smallest_image: int
    """Smaller images are enlarged by a whole factor to at least this many pixels a side."""
    folder_image: int
    """Pixels a side to which the images of a folder are cropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A model of the next token of a text."""

    name: str
    build: Callable[[int], nn.Module]
    """(vocabulary) -> module; (N, T) tokens -> (N, T, vocabulary) logits.

    With ``carries_state`` the module takes ``(tokens, state)`` and returns ``(logits, state)``.
    """
    carries_state: bool
    """Whether the state after one window is the start of the next."""
    window: int
    """Tokens a training window: the length of back-propagation through time."""


ModelSpec = ImageModel | TextModel
