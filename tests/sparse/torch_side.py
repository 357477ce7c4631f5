"""The CPU treated as a GPU is: by operations of torch, after marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from syncline.parallel import compression
from syncline.sparse import session
from syncline.sparse.side import Side
from syncline.sparse.torch_memory import TorchMemory

MARK = "reached at once"


class TorchSide(Side):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.memory = TorchMemory()

    def mark(self) -> str:
        return MARK

    @contextmanager
    def after(self, marks: Sequence[str]) -> Iterator[None]:
        assert all(mark == MARK for mark in marks)
        yield


@contextmanager
def torch_sides() -> Iterator[None]:
    """Let exchanges that are made within work by operations of torch."""
    with (
        mock.patch.object(session, "side_of", TorchSide),
        mock.patch.object(compression, "side_of", TorchSide),
    ):
        yield
