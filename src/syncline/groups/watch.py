"""``Watch``: notices that a peer has ended."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence

from syncline.groups.meeting import Introduced
from syncline.groups.messages import SHUTDOWN, USED_UP, reason_in, take_descriptors

MOST_DESCRIPTORS = 1

_NOTHING: tuple[bytes, Sequence[int]] = b"", ()
Take = Callable[[int, bytes, Sequence[int]], None]


class Watch:
    """A thread that reports peers that have ended or left the group, and their messages.

    It blocks in the kernel until there is something to report. A process that has died is reported
    at once, whether or not its parent has waited for it.

    Args:
        peers: the ranks to watch.
        lost: called on the thread with the peer's rank and what happened to it.
        take: called on the thread with the peer's rank, its message, and the files it passed.
    """

    def __init__(
        self, peers: Sequence[Introduced], lost: Callable[[int, str], None], take: Take
    ) -> None:
        self._lost = lost
        self._take = take
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._stop, select.POLLIN)
        self._sources: dict[int, Introduced] = {}
        for peer in peers:
            for descriptor in (peer.process, peer.connection.fileno()):
                self._poll.register(descriptor, select.POLLIN)
                self._sources[descriptor] = peer
        self._thread = threading.Thread(target=self._run, name="syncline watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._sources:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            for descriptor in ready:
                if descriptor == self._stop:
                    return
                if descriptor not in self._sources:
                    continue  # reported together with the one before it
                peer = self._sources[descriptor]
                rank = peer.rank
                if descriptor == peer.process and peer.connection.fileno() in ready:
                    continue  # its last messages come first
                try:
                    message, descriptors = (
                        _NOTHING if descriptor == peer.process else _received(peer)
                    )
                except OSError as error:
                    self._forget(peer)
                    self._lost(rank, f"no descriptor is left for a buffer of rank {rank}: {error}")
                    continue
                if message.startswith(SHUTDOWN):
                    said = f"rank {rank} has left the group{reason_in(message)}"
                elif message:
                    self._take(rank, message, descriptors)
                    continue
                else:
                    # A peer closes its end of the connection just before its process ends.
                    said = f"the process of rank {rank} has ended"
                self._forget(peer)
                self._lost(rank, said)

    def _forget(self, peer: Introduced) -> None:
        for descriptor in (peer.process, peer.connection.fileno()):
            self._poll.unregister(descriptor)
            del self._sources[descriptor]

    def close(self) -> None:
        """End the thread; from itself too, if the group is collected there."""
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            os.close(self._stop)


def _received(peer: Introduced) -> tuple[bytes, Sequence[int]]:
    """Return a message and the files that came with it; an empty one if the peer has ended.

    Raises:
        OSError: this process has run out of descriptors.
    """
    for _ in range(2):
        try:
            return take_descriptors(peer.connection, MOST_DESCRIPTORS)
        except ConnectionResetError:
            continue  # it closed with something unread; its earlier messages come next
        except OSError as error:
            if error.errno in USED_UP:
                raise
            break
    return _NOTHING
