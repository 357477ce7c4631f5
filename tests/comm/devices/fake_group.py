"""Ranks as threads that take turns, one at a time, in an order that a seed decides."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from syncline.comm.groups import Elements
from tests.timeouts import DEADLINE_S


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


class Pending:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()


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

    def receive(self, result: Elements, *, peer: int, tag: int) -> Pending:
        channel = self._turns.channels[peer, self.rank, tag]

        def finish() -> None:
            self._turns.until(self.rank, lambda: bool(channel))
            _write(result, channel.popleft())

        return Pending(finish)

    def all_gather(self, given: Elements, result: Elements, *, blocking: bool) -> Pending:
        assert blocking
        # The real group sends these through the same channels.
        left = [key for key, channel in self._turns.channels.items() if channel]
        assert not any(to == self.rank for _, to, _ in left), (
            "messages are left that were told and not heard"
        )
        notes = self._turns.gathered[self._gathers]
        self._gathers += 1
        notes[self.rank] = _read(given)

        def finish() -> None:
            self._turns.until(self.rank, lambda: len(notes) == self.ranks)
            _write(result, b"".join(notes[rank] for rank in range(self.ranks)))

        return Pending(finish)

    def close(self) -> None:
        self.closed = True


def _read(elements: Elements) -> bytes:
    return ctypes.string_at(elements.address, elements.size_bytes)


def _write(elements: Elements, value: bytes) -> None:
    assert len(value) == elements.size_bytes
    ctypes.memmove(elements.address, value, len(value))
