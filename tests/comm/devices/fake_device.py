"""A device that does its work late, and in the worst of orders that the recorded events allow.

Its streams hold what they were given until the world lets them go on: some at every call, by
priorities that are drawn anew now and then, so that one stream may be far ahead of all others or
far behind. A wait that is missing in the code under test then shows as a wrong result. Ranks are
threads that take turns, one at a time, in an order that a seed decides.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from syncline.comm.groups import Elements
from tests.comm.devices.host_device import CpuDevice
from tests.timeouts import DEADLINE_S

Line = tuple[str, int]  # a file and a line in it
NONE = ("", 0)


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
    """The streams of all ranks. A ``wait_event`` called in the dropped file and line is ignored."""

    def __init__(self, seed: int, dropped: Line = NONE) -> None:
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


class FakeDevice(CpuDevice):
    """A :class:`~syncline.comm.devices.CudaDevice` in a world; its tensors are on the CPU."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.device = torch.device("cpu")
        self.current = self.stream()

    def allocate(self, size_bytes: int, _streams: Sequence[object]) -> Tensor:
        return torch.full((size_bytes,), 255, dtype=torch.uint8)  # not-a-numbers of every dtype

    def share(self, what: object) -> bytes:
        name = f"handle {next(self.world.names)}".encode()
        self.world.shared[name] = what
        return name

    def open_event(self, handle: bytes) -> Any:
        return self.world.shared.pop(handle)  # by one process, once

    share_event, open = share, open_event

    def stream(self) -> FakeStream:
        return FakeStream(self.world)

    def current_stream(self) -> FakeStream:
        return self.current

    def shared_event(self) -> FakeEvent:
        return FakeEvent(self.world)


class DeadlockError(AssertionError):
    """All ranks wait for each other."""


class Turns:
    """Lets one rank run until it waits for another; then one of those that can go on."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.ranks = ranks
        self._random = random.Random(seed)
        self._turn = [threading.Semaphore(0) for _ in range(ranks)]
        self._able: dict[int, Callable[[], bool]] = {rank: lambda: True for rank in range(ranks)}
        """The ranks that have not ended, and what each waits for."""
        self._stuck = False
        self.channels: defaultdict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        self.gathered: defaultdict[int, dict[int, bytes]] = defaultdict(dict)

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        """Run a job on every rank; return what each returns or raises."""
        found: list[Any] = [None] * self.ranks

        def work(rank: int) -> None:
            self._turn[rank].acquire()
            try:
                found[rank] = job(rank)
            except BaseException as error:
                found[rank] = error
            del self._able[rank]
            self._next()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        return found

    def until(self, rank: int, able: Callable[[], bool]) -> None:
        """Let others run, at least until this rank is able to go on."""
        self._able[rank] = able
        self._next()
        self._turn[rank].acquire()
        if self._stuck:
            raise DeadlockError(f"rank {rank} waits for ever")

    def _next(self) -> None:
        able = [rank for rank, able in self._able.items() if self._stuck or able()]
        if not able and self._able:
            self._stuck = True
            able = list(self._able)
        if able:
            self._turn[self._random.choice(able)].release()


class FakeGroup:
    """What a ``DeviceGroup`` uses of :class:`~syncline.comm.groups.Group`."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self.rank = rank
        self.ranks = turns.ranks
        self.hosts = (tuple(range(turns.ranks)),)
        self.timeout_s = 60.0
        self.closed = False
        self._turns = turns
        self._gathers = 0

    def send(self, given: Elements, *, peer: int, tag: int) -> None:
        assert not self.closed
        self._turns.channels[self.rank, peer, tag].append(_read(given))
        self._turns.until(self.rank, lambda: True)

    def receive(self, result: Elements, *, peer: int, tag: int) -> Any:
        channel = self._turns.channels[peer, self.rank, tag]

        def finish() -> None:
            self._turns.until(self.rank, lambda: bool(channel))
            _write(result, channel.popleft())

        return SimpleNamespace(wait=finish)

    def all_gather(self, given: Elements, result: Elements, *, blocking: bool) -> Any:
        assert blocking
        # The real group sends these through the same channels.
        left = [key for key, channel in self._turns.channels.items() if channel]
        assert not any(to == self.rank for _, to, _ in left), "messages are left that nobody heard"
        notes = self._turns.gathered[self._gathers]
        self._gathers += 1
        notes[self.rank] = _read(given)

        def finish() -> None:
            self._turns.until(self.rank, lambda: len(notes) == self.ranks)
            _write(result, b"".join(notes[rank] for rank in range(self.ranks)))

        return SimpleNamespace(wait=finish)

    def close(self) -> None:
        self.closed = True


def _read(elements: Elements) -> bytes:
    return ctypes.string_at(elements.address, elements.size_bytes)


def _write(elements: Elements, value: bytes) -> None:
    assert len(value) == elements.size_bytes
    ctypes.memmove(elements.address, value, len(value))
