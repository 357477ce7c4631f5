"""The CPU treated as a GPU is: by operations of torch, after marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from syncline.parallel.engine import compression
from syncline.sparse import session
from syncline.sparse.stream_context import StreamContext
from syncline.sparse.torch_memory import TorchMemory

MARK = "reached at once"


class TorchStreamContext(StreamContext):
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
def torch_stream_contexts() -> Iterator[None]:
    """Let exchanges that are made within work by operations of torch."""
    with (
        mock.patch.object(session, "stream_context_for", TorchStreamContext),
        mock.patch.object(compression, "stream_context_for", TorchStreamContext),
    ):
        yield
