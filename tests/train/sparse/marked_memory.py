"""The CPU treated as a GPU is: by operations of torch, after marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from syncline.train.sparse import session
from syncline.train.sparse.torch_memory import TorchMemory

MARK = "reached at once"


class MarkedMemory(TorchMemory):
    def mark(self) -> str:
        return MARK

    @contextmanager
    def after(self, marks: Sequence[str]) -> Iterator[None]:
        assert all(mark == MARK for mark in marks)
        yield


@contextmanager
def marked_memories() -> Iterator[None]:
    """Let exchanges that are made within work by operations of torch."""
    with mock.patch.object(session, "memory_of", MarkedMemory):
        yield
