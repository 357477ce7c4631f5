"""How ranks meet and authenticate each other: those of one host over Unix sockets, others by TCP.

A rank connects to each lower rank. Both prove that they know the secret of the list of members,
without sending it:

1. caller: its rank and a nonce
2. answerer: a nonce, and a proof about both nonces and both ranks
3. caller: its own proof and, on one host, its memory
4. answerer: that it accepts the proof and, on one host, its memory

Whoever connects is ignored until it has proved that it is a rank. On one host both sides first ask
the kernel for the other's user, which must be their own.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from syncline.comm.groups.messages import (
    USED_UP,
    announce_shutdown,
    out_of_descriptors,
    take_descriptors,
)
from syncline.comm.groups.notes import CHECK_S, Notes, next_check_s
from syncline.errors import PeerError

NONCE_BYTES = 16
HELLO = struct.Struct(f"<4sI{NONCE_BYTES}s")  # :data:`MAGIC`, the caller's rank and its nonce
MAGIC = b"sync"
PROOF_BYTES = 32
REPLY = struct.Struct(f"<{NONCE_BYTES}s{PROOF_BYTES}s")  # the answerer's nonce and proof
CLAIM = struct.Struct("<B2I")
"""What a proof is about, before the two nonces: who proves, the caller's rank, the answerer's."""
BY_CALLER, BY_ANSWERER = range(2)
CREDENTIALS = struct.Struct("3i")  # process, user and group, as the kernel attests them
TIMEVAL = struct.Struct("ll")
BACKLOG = 4096  # connections that may wait for this rank; the kernel may allow fewer
MOST_ACCEPTED = 1024  # connections accepted at once, before those under way are served again
MOST_UNKNOWN = 256  # connections without a proof yet, beside one for each rank
RETRY_S = 0.02
NONE_ACCEPTED = (
    *(errno.EAGAIN, errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ENOPROTOOPT),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET),
    errno.EOPNOTSUPP,
)
"""What accept() reports if there is no connection, or the next one has broken already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """Another rank, authenticated."""

    rank: int
    connection: socket.socket

    def part(self, reason: BaseException) -> None:  # noqa: ARG002 - notes have it
        """Close the connection; on one host, tell the peer why."""
        self.close()

    def close(self) -> None:
        """Close the connection, and what belongs to it."""
        self.connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced(Connected):
    """Another rank of this host; its connection is open as long as the group is."""

    process: int  # a descriptor that becomes readable when its process ends (a pidfd)
    passed: list[int] = field(default_factory=list)
    """Descriptors that it has passed and that are not closed yet."""

    def part(self, reason: BaseException) -> None:
        """Close the connection, and tell the peer why."""
        announce_shutdown(self.connection, reason)
        self.close()

    def close(self) -> None:
        """Close the connection and all descriptors."""
        self.connection.close()
        os.close(self.process)
        while self.passed:
            os.close(self.passed.pop())


def listening_at(address: str) -> socket.socket:
    """Return a socket on which other ranks can meet this one; raise OSError if not allowed."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def listens(address: str) -> bool:
    """Return whether a process of this user listens there; raise OSError without a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            connection.connect(address)
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
        return _user_of(connection) == os.geteuid()


Met = TypeVar("Met", bound=Connected)
Talk = Generator[None, None, Met]
"""The protocol on one connection: it continues when there is something to read."""
Reading = Generator[None, None, tuple[bytes, list[int]]]


class StrangerError(Exception):
    """The other end is no rank of this group."""


@dataclass(slots=True, eq=False, repr=False)
class Meeting(Generic[Met]):
    """Meets other ranks."""

    _notes: Notes
    _addresses: Sequence[str]  # where each rank of the group listens
    _secret: bytes
    _listening: socket.socket
    _passed: Sequence[int] = ()
    """Descriptors for each rank that is met; each rank passes equally many."""
    _talks: dict[socket.socket, Talk[Met]] = field(default_factory=dict)
    _called: dict[int, socket.socket] = field(default_factory=dict)
    _missing: set[int] = field(default_factory=set)
    _met: dict[int, Met] = field(default_factory=dict)

    @property
    def _rank(self) -> int:
        return self._notes.rank

    def meet(self, others: Sequence[int]) -> list[Met]:
        """Meet other ranks, given in order; raise PeerError if one ends, or is late."""
        self._missing = set(others)
        checked_s = time.monotonic()
        try:
            while self._missing:
                for other in sorted(self._missing):
                    if other < self._rank and other not in self._called:
                        self._call(other)
                self._poll(next_check_s(self._notes.deadline))
                now_s = time.monotonic()
                if self._missing and now_s - checked_s >= CHECK_S:
                    checked_s = now_s
                    self._require_present()
                    if now_s >= self._notes.deadline:
                        who = ", ".join(map(str, sorted(self._missing)))
                        raise PeerError(
                            f"rank {self._rank}: rank {who} did not connect to it in time; "
                            f"{self._advice()}"
                        )
        except BaseException as error:
            for peer in self._met.values():
                peer.part(error)
            raise
        finally:
            self._called.clear()
            for connection in list(self._talks):
                self._hang_up(connection)
        return [self._met[other] for other in others]

    def _poll(self, timeout_s: float) -> None:
        """Wait for an event, and go on where one came."""
        poll = select.poll()
        sources = {each.fileno(): each for each in (self._listening, *self._talks)}
        for descriptor in sources:
            poll.register(descriptor, select.POLLIN)
        ready = [sources[descriptor] for descriptor, _ in poll.poll(timeout_s * 1000)]
        for each in ready:
            if each in self._talks:
                self._go_on(each)
        if self._listening in ready:
            self._accept()

    def _accept(self) -> None:
        for _ in range(MOST_ACCEPTED):
            unknown = [each for each in self._talks if each not in self._called.values()]
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if error.errno in USED_UP and unknown:
                    self._hang_up(unknown[0])  # so that a rank gets through
                elif error.errno not in NONE_ACCEPTED:
                    raise
                return
            if not self._admits(connection):
                connection.close()
                continue
            if len(unknown) >= MOST_UNKNOWN + len(self._addresses):
                self._hang_up(unknown[0])  # a rank would call again
            self._begin(connection, self._answering(connection))

    def _admits(self, connection: socket.socket) -> bool:
        raise NotImplementedError

    def _call(self, other: int) -> None:
        """Connect to a lower rank, or leave it to a later call; raise PeerError if it ended."""
        raise NotImplementedError

    def _require_present(self) -> None:
        """Raise PeerError if a missing rank has ended, or has posted why it does not join."""
        for other in sorted(self._missing):
            self._notes.require_joining(other)

    def _advice(self) -> str:
        return "does it hang?"

    def _calling(self, connection: socket.socket, other: int) -> Talk[Met]:
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.send(HELLO.pack(MAGIC, self._rank, mine))
        yield
        said, _ = yield from self._take(connection, REPLY.size)
        theirs, proof = REPLY.unpack(said)
        nonces = mine + theirs
        if not hmac.compare_digest(proof, self._proof(BY_ANSWERER, self._rank, other, nonces)):
            raise StrangerError
        proof = self._proof(BY_CALLER, self._rank, other, nonces)
        socket.send_fds(connection, [proof], self._passed)
        yield
        said, passed = yield from self._take(connection, len(MAGIC))
        return self._introduced(connection, other, said == MAGIC, passed)

    def _answering(self, connection: socket.socket) -> Talk[Met]:
        yield
        said, _ = yield from self._take(connection, HELLO.size)
        kind, other, theirs = HELLO.unpack(said)
        if kind != MAGIC or other <= self._rank or other not in self._missing:
            raise StrangerError
        mine = secrets.token_bytes(NONCE_BYTES)
        nonces = theirs + mine
        proof = self._proof(BY_ANSWERER, other, self._rank, nonces)
        connection.send(REPLY.pack(mine, proof))
        yield
        proof, passed = yield from self._take(connection, PROOF_BYTES)
        known = hmac.compare_digest(proof, self._proof(BY_CALLER, other, self._rank, nonces))
        peer = self._introduced(connection, other, known and other in self._missing, passed)
        try:
            socket.send_fds(connection, [MAGIC], self._passed)
        except BaseException:
            peer.close()
            raise
        return peer

    def _take(self, connection: socket.socket, size_bytes: int) -> Reading:
        """Read so many bytes, and the descriptors that come with them."""
        raise NotImplementedError

    def _introduced(
        self, connection: socket.socket, other: int, known: bool, passed: list[int]
    ) -> Met:
        """Return an authenticated rank, or close the descriptors that it has passed."""
        raise NotImplementedError

    def _proof(self, who: int, caller: int, answerer: int, nonces: bytes) -> bytes:
        return hmac.digest(self._secret, CLAIM.pack(who, caller, answerer) + nonces, "sha256")

    def _begin(self, connection: socket.socket, talk: Talk[Met]) -> None:
        connection.setblocking(False)
        self._talks[connection] = talk
        self._go_on(connection)

    def _go_on(self, connection: socket.socket) -> None:
        """Continue a protocol to its next wait, or until the rank is met."""
        try:
            next(self._talks[connection])
        except StopIteration as end:
            peer: Met = end.value
            del self._talks[connection]
            self._called.pop(peer.rank, None)
            self._missing.discard(peer.rank)
            self._met[peer.rank] = peer
        except (StrangerError, struct.error):
            self._hang_up(connection)
        except OSError as error:
            if error.errno in USED_UP:
                raise
            self._hang_up(connection)  # the peer has closed it

    def _hang_up(self, connection: socket.socket) -> None:
        self._talks.pop(connection).close()
        connection.close()
        for other, called in list(self._called.items()):
            if called is connection:
                del self._called[other]
                time.sleep(RETRY_S)  # _call() will retry


class Introduction(Meeting[Introduced]):
    """Meets other ranks of this host."""

    __slots__ = ()

    def _admits(self, connection: socket.socket) -> bool:
        return _user_of(connection) == os.geteuid()

    def _require_present(self) -> None:
        Meeting._require_present(self)
        for other in sorted(self._missing):
            if other not in self._called and not listens(self._addresses[other]):
                self._notes.require_joining(other)
                raise PeerError(
                    f"rank {self._rank}: rank {other} has ended before the two could meet on this "
                    "host"
                )

    def _call(self, other: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A blocking connect is served in turn, even if strangers keep connecting.
        wait = TIMEVAL.pack(0, int(CHECK_S * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        try:
            connection.connect(self._addresses[other])
        except BlockingIOError:
            connection.close()
            return
        except OSError as error:
            connection.close()
            self._notes.require_joining(other)
            raise PeerError(
                f"rank {self._rank} could not meet rank {other} on this host: {error}; it has "
                "ended while joining"
            ) from error
        user = _user_of(connection)
        if user != os.geteuid():
            connection.close()
            raise PeerError(
                f"rank {self._rank} runs as user {os.geteuid()} and rank {other} as user {user}: "
                "the ranks of a host must be processes of one user"
            )
        self._called[other] = connection
        self._begin(connection, self._calling(connection, other))

    def _take(self, connection: socket.socket, size_bytes: int) -> Reading:
        yield from ()
        if size_bytes in (HELLO.size, REPLY.size):
            return connection.recv(size_bytes + 1), []
        return take_descriptors(connection, len(self._passed))

    def _introduced(
        self, connection: socket.socket, other: int, known: bool, passed: list[int]
    ) -> Introduced:
        try:
            if not known or len(passed) != len(self._passed):
                raise StrangerError
            process = self._watchable(connection, other)
        except BaseException:
            for descriptor in passed:
                os.close(descriptor)
            raise
        connection.setblocking(True)
        return Introduced(rank=other, connection=connection, process=process, passed=passed)

    def _watchable(self, connection: socket.socket, other: int) -> int:
        try:
            return os.pidfd_open(_credentials(connection)[0])
        except OSError as error:
            refused = out_of_descriptors(self._rank, error) or PeerError(
                f"rank {self._rank} cannot watch the process of rank {other}: {error}; it may have "
                "ended, or be in a process namespace that cannot be seen from here"
            )
            announce_shutdown(connection, refused)
            raise refused from error


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    attested = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(attested)


def _user_of(connection: socket.socket) -> int:
    return _credentials(connection)[1]
