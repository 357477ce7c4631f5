"""``Contestant``: one way to run collectives, inside a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from syncline.bench.messages import Order
from syncline.bench.vectors import Vectors

__all__ = ["Contestant", "Run"]

Run = Callable[[], object]
"""Does the collective once, and returns when its result is in place."""


class Contestant(Protocol):
    """One way to run collectives. All ranks make the same calls in the same order."""

    def vectors(self, order: Order) -> Vectors:
        """Return memory that suits it."""

    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return what is to be measured; raises SynclineError where it cannot do it."""

    def release(self, vectors: Vectors) -> None:
        """Give memory back."""
