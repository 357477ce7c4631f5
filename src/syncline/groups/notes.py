"""Notes that ranks leave for each other in a store, also of why one of them does not join."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any, Protocol

from syncline.errors import PeerError

__all__ = ["LOOK_S", "Store", "leave_reason", "left_s", "read_note", "require_joining"]

LEAST_TIMEOUT_S = 0.05
MOST_TIMEOUT_S = 1e6
"""What sockets and stores take."""
LOOK_S = 1.0
"""So often who waits for a rank looks whether that has said why it does not come."""


class Store(Protocol):
    """Where ranks leave notes for each other: torch's ``Store`` is one."""

    def set(self, key: str, value: str, /) -> Any:
        """Leave a note."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> Any:
        """Wait for notes; raises RuntimeError where they do not come in time."""

    def get(self, key: str, /) -> bytes:
        """Return a note that is there."""


def left_s(deadline: float) -> float:
    """Return the seconds until a time of the monotonic clock, as sockets and stores take them."""
    return min(max(deadline - time.monotonic(), LEAST_TIMEOUT_S), MOST_TIMEOUT_S)


def read_note(
    store: Store, prefix: str, name: str, rank: int, other: int, deadline: float
) -> bytes:
    """Return what rank ``other`` has left in the store.

    Args:
        store: where all ranks of the group look.
        prefix: of the group's notes in it.
        name: of the note.
        rank: this rank.
        other: who leaves it.
        deadline: when to give up, on the monotonic clock, in seconds.

    Raises:
        PeerError: it does not come in time, or the rank has said that it does not join.
    """
    key = f"{prefix}/{name}"
    while True:
        began_s = time.monotonic()
        look_s = min(left_s(deadline), LOOK_S)
        try:
            store.wait([key], timedelta(seconds=look_s))
            return store.get(key)
        except RuntimeError as error:  # torch's DistStoreError is one
            require_joining(store, prefix, rank, other)
            ended_s = time.monotonic()
            waited = ended_s - began_s > look_s / 2  # else the store itself has failed
            if waited and ended_s < deadline:
                continue
            raise PeerError(
                f"rank {rank}: rank {other} did not join the group in time ({error}); has it "
                "started, with the same number of ranks?"
            ) from error


def leave_reason(store: Store, prefix: str, rank: int, error: BaseException) -> None:
    """Say why this rank does not join, so that who waits for it need not wait in vain."""
    with contextlib.suppress(RuntimeError):  # the store is gone, which others see by themselves
        store.set(_reason(prefix, rank), str(error) or type(error).__name__)


def require_joining(store: Store, prefix: str, rank: int, other: int) -> None:
    """Do nothing, unless another rank has said why it does not join.

    Raises:
        PeerError: it has.
    """
    key = _reason(prefix, other)
    try:
        store.wait([key], timedelta(seconds=LEAST_TIMEOUT_S))
        reason = store.get(key).decode()
    except RuntimeError:
        return  # it has not; or the store is gone, and the caller says so
    raise PeerError(f"rank {rank}: rank {other} does not join the group: {reason}")


def _reason(prefix: str, rank: int) -> str:
    return f"{prefix}/not joining/{rank}"
