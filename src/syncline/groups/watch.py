"""Noticing that a peer has ended."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence

from syncline.groups.rendezvous import Introduced

__all__ = ["GOODBYE", "Watch"]

GOODBYE = b"goodbye"


class Watch:
    """A thread that reports peers which have died, and peers which have left the group.

    It sleeps in the kernel until there is something to report. A process that has died is reported
    at once, whether or not its parent has waited for it.

    Args:
        peers: whom to watch.
        lost: called on the thread with the peer's rank and what became of it.
    """

    def __init__(self, peers: Sequence[Introduced], lost: Callable[[int, str], None]) -> None:
        self._lost = lost
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._stop, select.POLLIN)
        self._sources: dict[int, tuple[int, Introduced]] = {}
        for peer in peers:
            for descriptor in (peer.process, peer.connection.fileno()):
                self._poll.register(descriptor, select.POLLIN)
                self._sources[descriptor] = (peer.rank, peer)
        self._thread = threading.Thread(target=self._run, name="syncline watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._sources:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._stop:
                    return
                if descriptor not in self._sources:
                    continue  # reported together with the one before it
                rank, peer = self._sources[descriptor]
                if descriptor == peer.process:
                    said = f"the process of rank {rank} has ended"
                elif _left(peer):
                    said = f"rank {rank} has left the group"
                else:
                    # Its end of the connection is gone, and so, in a moment, is its process.
                    said = f"the process of rank {rank} has ended"
                self._forget(peer)
                self._lost(rank, said)

    def _forget(self, peer: Introduced) -> None:
        for descriptor in (peer.process, peer.connection.fileno()):
            self._poll.unregister(descriptor)
            del self._sources[descriptor]

    def close(self) -> None:
        """End the thread, from another one or, where a group is collected there, from itself."""
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            os.close(self._stop)


def _left(peer: Introduced) -> bool:
    try:
        return peer.connection.recv(len(GOODBYE)) == GOODBYE
    except OSError:
        return False
