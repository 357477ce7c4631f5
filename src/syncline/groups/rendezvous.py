"""How ranks of one host find each other, prove that they share memory, and exchange it."""

from __future__ import annotations

import array
import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from syncline.errors import PeerError, UserError

__all__ = ["Introduced", "Store", "introduce", "pass_descriptors", "take_descriptors"]

LEAST_TIMEOUT_S = 0.05
HELLO = struct.Struct("<I16s")
"""Rank and nonce."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as the kernel attests them."""


class Store(Protocol):
    """Where ranks leave notes for each other: torch's ``Store`` is one."""

    def set(self, key: str, value: str, /) -> Any:
        """Leave a note."""

    def get(self, key: str, /) -> bytes:
        """Return a note; waits for it, and raises RuntimeError where it does not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced:
    """Another rank of this host, known to be what it says."""

    rank: int
    connection: socket.socket
    """To it; it stays open as long as the group does."""
    process: int
    """A descriptor that becomes readable when its process ends (a pidfd)."""
    segment: int
    """A descriptor of its memory."""

    def close(self) -> None:
        """Close what was opened."""
        self.connection.close()
        os.close(self.process)
        os.close(self.segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """What a rank says of itself in the store."""

    host: tuple[str, str]
    """Boot and network namespace: ranks for which both are the same can share memory."""
    name: str
    """Of its host, for errors."""
    socket: str
    nonce: str

    @classmethod
    def own(cls) -> _Card:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            host=(boot, str(Path("/proc/self/ns/net").readlink())),
            name=socket.gethostname(),
            socket=f"\0syncline-{secrets.token_hex(16)}",
            nonce=secrets.token_hex(16),
        )

    def to_json(self) -> str:
        return json.dumps([self.host, self.name, self.socket, self.nonce])

    @classmethod
    def from_json(cls, text: bytes) -> _Card:
        host, name, address, nonce = json.loads(text)
        return cls(host=tuple(host), name=name, socket=address, nonce=nonce)


def introduce(
    store: Store, prefix: str, rank: int, ranks: int, segment: int, *, timeout_s: float
) -> list[Introduced]:
    """Meet the other ranks, and exchange memory with them.

    That a rank is on this host is not believed but seen: a connection through the kernel's own
    sockets, which do not leave a host, hands over its memory and attests its process.

    Args:
        store: where all ranks of the group look.
        prefix: of the group's notes in it.
        rank: this rank.
        ranks: how many there are.
        segment: descriptor of the memory that this rank gives to the others.
        timeout_s: deadline for all of it.

    Returns:
        All other ranks, in order.

    Raises:
        PeerError: a rank did not come, or is not what it says.
        UserError: a rank is on another host, or this host does not allow processes to meet.
    """
    deadline = time.monotonic() + timeout_s
    card = _Card.own()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(card.socket)
        listening.listen(ranks)
        store.set(f"{prefix}/{rank}", card.to_json())
        cards = [_card_of(store, prefix, rank, other) for other in range(ranks)]
        for other, theirs in enumerate(cards):
            if theirs.host != card.host:
                raise UserError(
                    f"rank {other} is on host {theirs.name!r} and rank {rank} on {card.name!r}: "
                    "shared memory joins ranks of one host; use another backend between hosts"
                )
        met: dict[int, Introduced] = {}
        with contextlib.ExitStack() as on_error:
            for other in range(rank):
                met[other] = _call(cards, rank, other, segment, deadline)
                on_error.callback(met[other].close)
            while missing := [other for other in range(rank + 1, ranks) if other not in met]:
                peer = _answer(listening, cards, rank, missing, segment, deadline)
                on_error.callback(peer.close)
                met[peer.rank] = peer
            on_error.pop_all()
    return [met[other] for other in sorted(met)]


def _card_of(store: Store, prefix: str, rank: int, other: int) -> _Card:
    try:
        return _Card.from_json(store.get(f"{prefix}/{other}"))
    except RuntimeError as error:  # torch's DistStoreError is one
        raise PeerError(
            f"rank {rank}: rank {other} did not join the group in time ({error}); has it started, "
            "with the same number of ranks?"
        ) from error


def _call(
    cards: Sequence[_Card], rank: int, other: int, segment: int, deadline: float
) -> Introduced:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_left(deadline))
        connection.connect(cards[other].socket)
        _greet(connection, cards, rank, segment)
        return _greeted(connection, cards, rank, range(other, other + 1))
    except OSError as error:
        connection.close()
        raise PeerError(
            f"rank {rank} could not meet rank {other} on this host: {error}; it may have ended, or "
            "the two may not see each other's sockets (containers with networks of their own)"
        ) from error
    except BaseException:
        connection.close()
        raise


def _answer(
    listening: socket.socket,
    cards: Sequence[_Card],
    rank: int,
    missing: Sequence[int],
    segment: int,
    deadline: float,
) -> Introduced:
    connection = None
    try:
        listening.settimeout(_left(deadline))
        connection, _ = listening.accept()
        connection.settimeout(_left(deadline))
        peer = _greeted(connection, cards, rank, missing)
        _greet(connection, cards, rank, segment)
    except OSError as error:
        if connection is not None:
            connection.close()
        said = ", ".join(map(str, missing))
        raise PeerError(
            f"rank {rank}: rank {said} did not come to meet it ({error}); has it ended?"
        ) from error
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    return peer


def _greet(connection: socket.socket, cards: Sequence[_Card], rank: int, segment: int) -> None:
    pass_descriptors(connection, HELLO.pack(rank, bytes.fromhex(cards[rank].nonce)), [segment])


def _greeted(
    connection: socket.socket, cards: Sequence[_Card], rank: int, expected: Sequence[int]
) -> Introduced:
    """Take the greeting of one of the expected ranks."""
    hello, descriptors = take_descriptors(connection, HELLO.size, 1)
    try:
        if len(hello) != HELLO.size or len(descriptors) != 1:
            raise PeerError(
                f"rank {rank}: a process that is no rank of this group called, or has ended"
            )
        other, nonce = HELLO.unpack(hello)
        if other not in expected or nonce.hex() != cards[other].nonce:
            raise PeerError(
                f"rank {rank}: a process says that it is rank {other} and is not: does another job "
                "use the same store and group name?"
            )
        attested = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        try:
            process = os.pidfd_open(CREDENTIALS.unpack(attested)[0])
        except OSError as error:
            raise PeerError(
                f"rank {rank} cannot watch the process of rank {other}: {error}; it may have "
                "ended, or be in a process namespace that cannot be seen from here"
            ) from error
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    connection.settimeout(None)
    return Introduced(rank=other, connection=connection, process=process, segment=descriptors[0])


def pass_descriptors(connection: socket.socket, message: bytes, descriptors: list[int]) -> None:
    """Send a message together with open files."""
    rights = array.array("i", descriptors)
    connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def take_descriptors(connection: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a message of up to ``size`` bytes with up to ``most`` open files."""
    space = socket.CMSG_SPACE(most * array.array("i").itemsize)
    message, ancillary, _, _ = connection.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return message, list(found)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), LEAST_TIMEOUT_S)
