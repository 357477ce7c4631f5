"""``Watch``: notices that a peer has ended."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Sequence

from syncline.comm.groups.meeting import Introduced
from syncline.comm.groups.messages import SHUTDOWN, USED_UP, reason_in, take_descriptors
from syncline.comm.groups.shared_buffers import SharedBuffers

_NOTHING: tuple[bytes, Sequence[int]] = b"", ()


class Watch:
    """A thread that reports peers that have ended or left, and passes on their buffers' notices.

    A process that has died is reported at once, whether or not its parent has waited for it. Raise
    OSError if no thread can be started.
    """

    def __init__(self, peers: Sequence[Introduced], buffers: SharedBuffers) -> None:
        self._buffers = buffers
        self.ended: set[int] = set()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._stop, select.POLLIN)
        self._sources: dict[int, Introduced] = {}
        for peer in peers:
            for descriptor in (peer.process, peer.connection.fileno()):
                self._poll.register(descriptor, select.POLLIN)
                self._sources[descriptor] = peer
        self._thread = threading.Thread(target=self._run, name="syncline watch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._stop)
            raise OSError(errno.EAGAIN, str(error)) from error

    def _run(self) -> None:
        while self._sources:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            if self._stop in ready:
                return
            peers = [self._sources[descriptor] for descriptor in ready]
            for rank, peer in {peer.rank: peer for peer in peers}.items():
                # The last messages of a process come before its end.
                spoke = peer.connection.fileno() in ready
                try:
                    message, descriptors = _received(peer) if spoke else _NOTHING
                except OSError as error:
                    self._lose(peer, f"no descriptor is left for a buffer of rank {rank}: {error}")
                    continue
                if message.startswith(SHUTDOWN):
                    self._lose(peer, f"rank {rank} has left the group{reason_in(message)}")
                elif message:
                    self._buffers.take(rank, message, descriptors)
                else:
                    # A peer closes its end of the connection just before its process ends.
                    self.ended.add(rank)
                    self._lose(peer, f"the process of rank {rank} has ended")

    def _lose(self, peer: Introduced, what: str) -> None:
        for descriptor in (peer.process, peer.connection.fileno()):
            self._poll.unregister(descriptor)
            del self._sources[descriptor]
        self._buffers.lose(peer.rank, what)

    def close(self) -> None:
        """End the thread; from itself too, if the group is collected there."""
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            os.close(self._stop)
        self._buffers.abandon()


def _received(peer: Introduced) -> tuple[bytes, Sequence[int]]:
    """Return a message and its files; an empty one if the peer has ended. Raises EMFILE."""
    for _ in range(2):
        try:
            return take_descriptors(peer.connection, 1)
        except ConnectionResetError:
            continue  # it closed with something unread; its earlier messages come next
        except OSError as error:
            if error.errno in USED_UP:
                raise
            break
    return _NOTHING
