"""A device that does its work late, and in the worst of orders that the recorded events allow.

Its streams hold what they were given until the world lets them go on: some at every call, by
priorities that are drawn anew now and then, so that one stream may be far ahead of all others or
far behind. A wait that is missing in the code under test then shows as a wrong result.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.comm.devices.cuda import REDUCTIONS

NOBODY = ("", 0)


class Ticket:
    """One recording of an event: whether the stream has come to it."""

    def __init__(self) -> None:
        self.reached = False


class FakeEvent:
    def __init__(self, world: World) -> None:
        self.world = world
        self.latest: Ticket | None = None

    def query(self) -> bool:
        self.world.advance()
        return _reached(self.latest)


class FakeStream:
    def __init__(self, world: World) -> None:
        self.world = world
        self.work: deque[tuple[Ticket | None, Callable[[], object]]] = deque()
        """What is to be done, and after what."""
        self.priority = world.random.random()
        world.streams.append(self)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.world)
        ticket = event.latest = Ticket()
        self.do(lambda: setattr(ticket, "reached", True))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        caller = inspect.currentframe().f_back  # type: ignore[union-attr]
        assert caller is not None
        if (Path(caller.f_code.co_filename).name, caller.f_lineno) == self.world.dropped:
            self.world.dropped_waits += 1
            return
        # As CUDA has it: what is not recorded yet is not waited for.
        self.do(lambda: None, event.latest)

    def do(self, work: Callable[[], object], after: Ticket | None = None) -> None:
        self.work.append((after, work))
        self.world.stir()


class World:
    """The streams of all ranks.

    Args:
        seed: of every order.
        dropped: file and line of a call of ``wait_event`` that is to do nothing.
    """

    def __init__(self, seed: int, dropped: tuple[str, int] = NOBODY) -> None:
        self.random = random.Random(seed)
        self.changes = self.random.choice((0.3, 0.03, 0.003))
        """How likely priorities change from one operation to the next."""
        self.eagerness = self.random.choice((0.0, 0.02, 0.1, 0.5))
        """How likely streams go on at a call, rather than at the end."""
        self.dropped = dropped
        self.dropped_waits = 0
        self.streams: list[FakeStream] = []
        self.shared: dict[bytes, Any] = {}
        self.names = itertools.count()

    def stir(self) -> None:
        """Let some streams go on for a while, or none."""
        self._draw_priorities()
        if self.random.random() < self.eagerness:
            self.advance()

    def advance(self) -> None:
        """Let some streams go on for a while."""
        for _ in range(self.random.choice((1, 3, 20))):
            if not self._advance():
                return

    def finish(self) -> None:
        """Let all streams do all they have.

        Raises:
            AssertionError: they wait for each other for ever.
        """
        while self._advance():
            self._draw_priorities()
        assert not any(stream.work for stream in self.streams), "streams wait for each other"

    def _draw_priorities(self) -> None:
        if self.random.random() < self.changes:
            for stream in self.streams:
                stream.priority = self.random.random()

    def _advance(self) -> bool:
        able = [stream for stream in self.streams if stream.work and _reached(stream.work[0][0])]
        if not able:
            return False
        max(able, key=lambda stream: stream.priority).work.popleft()[1]()
        return True


def _reached(ticket: Ticket | None) -> bool:
    return ticket is None or ticket.reached


class FakeDevice:
    """A :class:`~syncline.comm.devices.CudaDevice` in a world; its tensors are on the CPU."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.device = torch.device("cpu")
        self.current = self.stream()

    def allocate(self, size_bytes: int, _streams: Sequence[object]) -> Tensor:
        return torch.full((size_bytes,), 255, dtype=torch.uint8)  # not-a-numbers of every dtype

    def share(self, memory: Tensor) -> bytes:
        return self._shared(memory)

    def open(self, handle: bytes) -> Tensor:
        opened: Tensor = self.world.shared.pop(handle)  # by one process, once
        return opened

    def stream(self) -> FakeStream:
        return FakeStream(self.world)

    def current_stream(self) -> FakeStream:
        return self.current

    def shared_event(self) -> FakeEvent:
        return FakeEvent(self.world)

    def share_event(self, event: FakeEvent) -> bytes:
        return self._shared(event)

    def open_event(self, handle: bytes) -> FakeEvent:
        opened: FakeEvent = self.world.shared.pop(handle)
        return opened

    def copy(self, stream: FakeStream, source: Tensor, into: Tensor) -> None:
        assert source.shape == into.shape
        assert source.dtype == into.dtype
        stream.do(lambda: into.copy_(source))

    def combine(self, stream: FakeStream, reduction: str, given: Tensor, into: Tensor) -> None:
        stream.do(lambda: REDUCTIONS[reduction](into, given, out=into))

    def divide(self, stream: FakeStream, into: Tensor, divisor: int) -> None:
        stream.do(lambda: into.div_(divisor))

    def _shared(self, what: object) -> bytes:
        name = f"handle {next(self.world.names)}".encode()
        self.world.shared[name] = what
        return name
