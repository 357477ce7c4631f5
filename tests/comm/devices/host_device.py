"""A device whose memory is a shared file and which does its work at once: for real processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from syncline.comm.devices.cuda import REDUCTIONS


class AtOnce:
    """A stream, and an event, of work that is done when it is given."""

    def record_event(self, _event: AtOnce | None = None) -> AtOnce:
        return self

    def wait_event(self, _event: AtOnce) -> None:
        pass

    def query(self) -> bool:
        return True


class HostDevice:
    """A :class:`~syncline.comm.devices.CudaDevice` of the CPU.

    Args:
        folder: of its files, which all ranks share.
    """

    def __init__(self, folder: str) -> None:
        self.device = torch.device("cpu")
        self._folder = Path(folder)
        self._files = itertools.count()
        self._paths: dict[int, Path] = {}

    def allocate(self, size_bytes: int, _streams: Sequence[object]) -> Tensor:
        path = self._folder / f"memory of {os.getpid()}, {next(self._files)}"
        path.write_bytes(bytes(size_bytes))
        memory = _mapped(path)
        self._paths[memory.data_ptr()] = path
        return memory

    def share(self, memory: Tensor) -> bytes:
        return str(self._paths[memory.data_ptr()]).encode()

    def open(self, handle: bytes) -> Tensor:
        return _mapped(Path(handle.decode()))

    def stream(self) -> AtOnce:
        return AtOnce()

    def current_stream(self) -> AtOnce:
        return AtOnce()

    def shared_event(self) -> AtOnce:
        return AtOnce()

    def share_event(self, _event: AtOnce) -> bytes:
        return b"event"

    def open_event(self, handle: bytes) -> AtOnce:
        assert handle == b"event"
        return AtOnce()

    def copy(self, _stream: AtOnce, source: Tensor, into: Tensor) -> None:
        into.copy_(source)

    def combine(self, _stream: AtOnce, reduction: str, given: Tensor, into: Tensor) -> None:
        REDUCTIONS[reduction](into, given, out=into)

    def divide(self, _stream: AtOnce, into: Tensor, divisor: int) -> None:
        into.div_(divisor)


def _mapped(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
