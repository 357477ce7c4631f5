"""Notes that ranks leave for each other in a store, such as why one of them does not join."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Protocol

from syncline.errors import PeerError

__all__ = [
    "LOOK_S",
    "Store",
    "arrived",
    "leave_reason",
    "left_s",
    "read_note",
    "require_joining",
]

LEAST_TIMEOUT_S = 0.05
MOST_TIMEOUT_S = 1e6
"""The limits of sockets and stores."""
PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.01
"""Between two polls for a note: at first, and at most. In between, a tenth of the time waited."""
LOOK_S = 0.25
"""How often a waiting rank checks whether its peer has ended or has posted a failure."""


class Store(Protocol):
    """Where ranks leave notes for each other: torch's ``Store`` is one."""

    def set(self, key: str, value: str, /) -> Any:
        """Leave a note."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all these notes are there."""

    def get(self, key: str, /) -> bytes:
        """Return a note that is there."""


def left_s(deadline: float) -> float:
    """Return the seconds until a time of the monotonic clock, as sockets and stores take them."""
    return min(max(deadline - time.monotonic(), LEAST_TIMEOUT_S), MOST_TIMEOUT_S)


def arrived(store: Store, keys: list[str], deadline: float, rank: int) -> bool:
    """Wait for notes until the deadline, but no longer than ``LOOK_S``; return whether they came.

    Raises:
        PeerError: the store itself has failed.
    """
    began_s = time.monotonic()
    look_s = min(left_s(deadline), LOOK_S)
    try:
        # Not with the store's own wait: a FileStore polls every 10 ms, a TCPStore prints a warning
        # at every timeout.
        while not store.check(keys):
            waited_s = time.monotonic() - began_s
            if waited_s >= look_s:
                return False
            time.sleep(min(max(waited_s / 10, PAUSE_S), LONGEST_PAUSE_S))
    except RuntimeError as error:  # torch's DistStoreError is one
        raise PeerError(
            f"rank {rank}: the store through which ranks find each other has failed: {error}; "
            "has the process that holds it ended?"
        ) from error
    return True


def read_note(
    store: Store, prefix: str, name: str, rank: int, other: int, deadline: float
) -> bytes:
    """Return a note that rank ``other`` has left in the store.

    Args:
        store: where all ranks of the group look.
        prefix: of the notes of this roll call; see :class:`~syncline.groups.rendezvous.RollCall`.
        name: of the note.
        rank: this rank.
        other: the rank that leaves it.
        deadline: when to give up, on the monotonic clock, in seconds.

    Raises:
        PeerError: it does not come in time, or the rank has said that it does not join.
    """
    key = f"{prefix}/{name}"
    while not arrived(store, [key], deadline, rank):
        require_joining(store, prefix, rank, other)
        if time.monotonic() >= deadline:
            raise PeerError(
                f"rank {rank}: rank {other} did not join the group in time; see its output"
            )
    return store.get(key)


def leave_reason(store: Store, prefix: str, rank: int, error: BaseException) -> None:
    """Post why this rank does not join, so that no other rank waits for it."""
    with contextlib.suppress(RuntimeError):  # the store is gone, which the others notice
        store.set(_reason(prefix, rank), str(error) or type(error).__name__)


def require_joining(store: Store, prefix: str, rank: int, other: int) -> None:
    """Raise if another rank has posted why it does not join.

    Raises:
        PeerError: with that rank's reason.
    """
    key = _reason(prefix, other)
    try:
        if not store.check([key]):
            return
        reason = store.get(key).decode()
    except RuntimeError:
        return  # the store is gone, and the caller reports it
    raise PeerError(f"rank {rank}: rank {other} does not join the group: {reason}")


def _reason(prefix: str, rank: int) -> str:
    return f"{prefix}/not joining/{rank}"
