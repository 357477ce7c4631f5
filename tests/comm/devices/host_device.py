"""A device whose memory is a shared file and which does its work at once: for real processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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

    def do(self, work: Callable[[], object]) -> None:
        work()


class CpuDevice:
    """What streams of :class:`~syncline.comm.devices.CudaDevice` do, on the CPU."""

    def copy(self, stream: Any, source: Tensor, into: Tensor) -> None:
        assert (source.shape, source.dtype) == (into.shape, into.dtype)
        stream.do(lambda: into.copy_(source))

    def combine(self, stream: Any, reduction: str, given: Tensor, into: Tensor) -> None:
        stream.do(lambda: REDUCTIONS[reduction](into, given, out=into))

    def divide(self, stream: Any, into: Tensor, divisor: int) -> None:
        stream.do(lambda: into.div_(divisor))


class HostDevice(CpuDevice):
    """A :class:`~syncline.comm.devices.CudaDevice` of the CPU; all ranks share its folder."""

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

    current_stream = shared_event = stream

    def share_event(self, _event: AtOnce) -> bytes:
        return b"event"

    def open_event(self, handle: bytes) -> AtOnce:
        assert handle == b"event"
        return AtOnce()


def _mapped(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
