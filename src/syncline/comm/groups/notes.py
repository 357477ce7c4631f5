"""Notes that ranks leave for each other in a store, such as why one of them does not join."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from syncline.errors import PeerError

T = TypeVar("T")
PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.01
"""Pauses between polls for a note, at first and at most. Otherwise a tenth of the time waited."""
CHECK_S = 0.25  # how often a waiting rank checks whether its peer has ended or has posted a failure
LEAST_CHECK_S = 0.05
REFUSAL = "not joining"  # the names of notes that say why a rank does not join begin with this


class Store(Protocol):
    """Where ranks leave notes for each other: torch's ``Store`` is one."""

    def set(self, key: str, value: str, /) -> Any:
        """Leave a note."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all these notes are there."""

    def get(self, key: str, /) -> bytes:
        """Return a note that is there."""


@dataclass(frozen=True, slots=True)
class WatchedStore:
    """A store whose ``check`` raises PeerError, so that no rank waits for one that has ended."""

    _store: Store
    _require_present: Callable[[], None]
    """Raises PeerError if a rank that is to leave a note is known to have ended."""

    def set(self, key: str, value: str, /) -> Any:
        """Leave a note."""
        return self._store.set(key, value)

    def check(self, keys: list[str], /) -> bool:
        """Return whether all these notes are there; if not, raise PeerError if a rank has ended."""
        there = self._store.check(keys)
        if not there:
            self._require_present()
        return there

    def get(self, key: str, /) -> bytes:
        """Return a note that is there."""
        return self._store.get(key)


def next_check_s(deadline: float) -> float:
    """Return the seconds to wait before the next check, at most until about the deadline."""
    return min(max(deadline - time.monotonic(), LEAST_CHECK_S), CHECK_S)


def arrived(store: Store, keys: list[str], deadline: float, rank: int) -> bool:
    """Wait for notes until the deadline, at most ``CHECK_S``; return whether they have come."""
    began_s = time.monotonic()
    longest_s = next_check_s(deadline)
    try:
        # Not with the store's own wait: a FileStore polls every 10 ms, a TCPStore prints a warning
        # at every timeout.
        while not store.check(keys):
            waited_s = time.monotonic() - began_s
            if waited_s >= longest_s:
                return False
            time.sleep(min(max(waited_s / 10, PAUSE_S), LONGEST_PAUSE_S))
    except PeerError:
        raise
    except RuntimeError as error:  # torch's DistStoreError is one
        raise PeerError(
            f"rank {rank}: the store through which ranks find each other has failed: {error}; "
            "has the process that holds it ended?"
        ) from error
    return True


def unreadable(rank: int, other: int, why: object) -> PeerError:
    """Return the error to raise if a note of rank ``other`` cannot be understood."""
    return PeerError(
        f"rank {rank}: a note of rank {other} in the store cannot be read ({why}); do all ranks "
        "have the same version of Syncline?"
    )


def encoded(value: object) -> str:
    """Return a value as the text of a note."""
    return msgspec.json.encode(value).decode()


def decoded(text: bytes | str, kind: type[T], rank: int, other: int) -> T:
    """Return the value in a note of rank ``other``; raise PeerError if it is none of ``kind``."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise unreadable(rank, other, error) from error


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes that the ranks of one group leave for each other while it forms."""

    _store: Store
    prefix: str  # of their keys in the store; no other group has it
    rank: int
    deadline: float  # when to give up waiting for one, on the monotonic clock, in seconds

    def leave(self, name: str, text: str) -> None:
        """Leave a note, under a name that no other rank uses."""
        self._store.set(f"{self.prefix}/{name}", text)

    def read(self, name: str, other: int) -> bytes:
        """Return a note of another rank; raise PeerError if it, or the rank, does not come."""
        key = f"{self.prefix}/{name}"
        while not arrived(self._store, [key], self.deadline, self.rank):
            self.require_joining(other)
            if time.monotonic() >= self.deadline:
                raise PeerError(
                    f"rank {self.rank}: rank {other} did not join the group in time; see its output"
                )
        return self._store.get(key)

    def refuse(self, error: BaseException) -> None:
        """Leave the reason why this rank does not join, so that no other rank waits for it."""
        with contextlib.suppress(RuntimeError):  # the store is gone, which the others notice
            self.leave(f"{REFUSAL}/{self.rank}", str(error) or type(error).__name__)

    def require_joining(self, other: int) -> None:
        """Raise PeerError with another rank's reason if it has left one why it does not join."""
        key = f"{self.prefix}/{REFUSAL}/{other}"
        try:
            if not self._store.check([key]):
                return
            reason = self._store.get(key).decode(errors="replace")
        except PeerError:  # the store knows that a rank has ended
            raise
        except RuntimeError:
            return  # the store is gone, and the caller reports it
        raise PeerError(f"rank {self.rank}: rank {other} does not join the group: {reason}")
