"""Gradients that are on their way when the wrapper of their model is dropped."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from syncline.parallel.pending import is_pending, release

if TYPE_CHECKING:
    from syncline.parallel.engine import Engine

__all__ = ["Orphans"]


class Orphans:
    """Finishes the gradients of a model that has no wrapper any more.

    Each gradient keeps this object alive, which keeps none of them alive: a parameter refers to its
    gradient where garbage collection cannot look, so a circle would never be freed.

    Args:
        engine: exchanges them.
        gradients: by the index of their tensor.
    """

    def __init__(self, engine: Engine, gradients: Mapping[int, torch.Tensor]) -> None:
        self._engine = engine
        self._gradients = [weakref.ref(gradient) for gradient in gradients.values()]
        self._indices = list(gradients)

    def read_parameters(self, indices: list[int]) -> None:
        """No update is due."""
        raise AssertionError(f"parameters {indices} wait for no gradient")

    def read_gradients(self, indices: list[int]) -> None:  # noqa: ARG002
        """Wait for all gradients."""
        self._engine.wait(self._indices)
        for gradient in self._alive():
            if is_pending(gradient):
                release(gradient)

    def zero_gradients(self, indices: list[int]) -> None:
        """Wait for all gradients, and set some to zero."""
        chosen = [self._gradients[self._indices.index(index)]() for index in indices]
        self.read_gradients(indices)
        for gradient in chosen:
            if gradient is not None:
                gradient.zero_()

    def _alive(self) -> Iterable[torch.Tensor]:
        return [g for reference in self._gradients if (g := reference()) is not None]
