"""``Watch``: notices that a peer has ended."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Sequence

from syncline import _native
from syncline.comm.groups.meeting import Introduced
from syncline.comm.groups.messages import MOST_BYTES, SHUTDOWN, reason_in


class Watch:
    """A thread that tells the native group which peers have ended or left.

    A process that has died is reported at once, whether or not its parent has waited for it. Raise
    OSError if no thread can be started.
    """

    def __init__(self, peers: Sequence[Introduced], native: _native.NativeGroup) -> None:
        self._native = native
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
                # The last message of a process comes before its end.
                message = _received(peer) if peer.connection.fileno() in ready else b""
                if message.startswith(SHUTDOWN):
                    self._lose(peer, f"rank {rank} has left the group{reason_in(message)}")
                elif message:
                    expected = f"expected a notice that it leaves, found {message[:32]!r}"
                    self._lose(peer, f"rank {rank} is faulty: {expected}")
                else:
                    # A peer closes its end of the connection just before its process ends.
                    self.ended.add(rank)
                    self._lose(peer, f"the process of rank {rank} has ended")

    def _lose(self, peer: Introduced, what: str) -> None:
        for descriptor in (peer.process, peer.connection.fileno()):
            self._poll.unregister(descriptor)
            del self._sources[descriptor]
        self._native.lose(peer.rank, what)

    def close(self) -> None:
        """End the thread; from itself too, if the group is collected there."""
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            os.close(self._stop)


def _received(peer: Introduced) -> bytes:
    """Return a message without the files that come with it; an empty one if the peer has ended."""
    for _ in range(2):
        try:
            return peer.connection.recv(MOST_BYTES)
        except ConnectionResetError:
            continue  # it closed with something unread; its earlier messages come next
        except OSError:
            break
    return b""
