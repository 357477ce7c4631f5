"""How ranks of one host find each other, prove that they share memory, and exchange it."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from syncline.errors import PeerError, UserError
from syncline.groups.messages import (
    GOODBYE,
    pass_descriptors,
    reason_in,
    say_goodbye,
    take_descriptors,
)
from syncline.groups.notes import (
    LOOK_S,
    Store,
    leave_reason,
    left_s,
    read_note,
    require_joining,
)
from syncline.groups.site import Route, Site, machine_identity

__all__ = [
    "Card",
    "Introduced",
    "Reception",
    "pass_descriptors",
    "say_goodbye",
    "take_descriptors",
]

HELLO = struct.Struct("<I16s")
"""Rank and nonce."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as the kernel attests them."""


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
    event: int
    """An eventfd that wakes it."""

    def part(self, reason: BaseException) -> None:
        """Close what was opened, and let the other know why."""
        say_goodbye(self.connection, reason)
        self.close()

    def close(self) -> None:
        """Close what was opened."""
        self.connection.close()
        os.close(self.process)
        os.close(self.segment)
        os.close(self.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a rank says of itself in the store."""

    host: tuple[str, str]
    """Boot and network namespace: ranks for which both are the same can share memory."""
    name: str
    """Of its host, for errors."""
    machine: str
    """What its host is called in measured choices; see :func:`machine_identity`."""
    socket: str
    nonce: str

    @classmethod
    def own(cls) -> Card:
        """Return that of this process, with a socket that nobody has yet."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            host=(boot, str(Path("/proc/self/ns/net").readlink())),
            name=socket.gethostname(),
            machine=machine_identity(),
            socket=f"\0syncline-{secrets.token_hex(16)}",
            nonce=secrets.token_hex(16),
        )

    def to_json(self) -> str:
        """Return it as others read it."""
        return json.dumps([self.host, self.name, self.machine, self.socket, self.nonce])

    @classmethod
    def from_json(cls, text: bytes) -> Card:
        """Return what another rank has left."""
        host, name, machine, address, nonce = json.loads(text)
        return cls(host=tuple(host), name=name, machine=machine, socket=address, nonce=nonce)


class Reception:
    """Where ranks of one host come to meet this one, and exchange memory.

    That a rank is on this host is not believed but seen: a connection through the kernel's own
    sockets, which do not leave a host, hands over its memory and attests its process.

    Args:
        store: where all ranks of the group look.
        prefix: of the group's notes in it.
        rank: this rank.
        ranks: how many there are.
        deadline: when to give up, on the monotonic clock, in seconds.

    Raises:
        PeerError: on construction, if a rank does not join.
        UserError: on construction, if this host does not let processes meet.
    """

    def __init__(self, store: Store, prefix: str, rank: int, ranks: int, deadline: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._deadline = deadline
        try:
            card = Card.own()
            self._listening = _listening(card.socket, ranks)
        except OSError as error:
            refused = UserError(
                f"rank {rank}: processes of this host are not allowed to meet (Unix sockets, "
                f"/proc): {error}"
            )
            leave_reason(store, prefix, rank, refused)
            raise refused from error
        try:
            store.set(f"{prefix}/{rank}", card.to_json())
            self.cards = [
                Card.from_json(read_note(store, prefix, f"{other}", rank, other, deadline))
                for other in range(ranks)
            ]
        except BaseException as error:
            self._end(error)
            raise

    def __enter__(self) -> Reception:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            leave_reason(self._store, self._prefix, self._rank, error)
        self._listening.close()

    @property
    def neighbours(self) -> list[int]:
        """The ranks of this host, this one included."""
        own = self.cards[self._rank].host
        return [rank for rank, card in enumerate(self.cards) if card.host == own]

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, card in enumerate(self.cards):
            found.setdefault(card.host, []).append(rank)
        return tuple(map(tuple, found.values()))

    def site(self, route: Route) -> Site:
        """Return where the ranks are; each counts as on a host of its own by UCX alone."""
        cards = [self.cards[host[0]] for host in self.hosts]
        alone = tuple((rank,) for rank in range(len(self.cards)))
        return Site(
            route=route,
            layout=alone if route == "ucx" else self.hosts,
            machines=tuple(sorted(card.machine for card in cards)),
            names=tuple(sorted(card.name for card in cards)),
        )

    def meet(self, others: Sequence[int], descriptors: Sequence[int]) -> list[Introduced]:
        """Meet other ranks of this host.

        Args:
            others: who, in order.
            descriptors: of this rank's segment of memory, and of the eventfd that wakes it.

        Raises:
            PeerError: a rank did not come, or is not what it says.
        """
        met: dict[int, Introduced] = {}
        arguments = self.cards, self._rank
        try:
            for other in others:
                if other < self._rank:
                    try:
                        met[other] = _call(*arguments, other, descriptors, self._deadline)
                    except PeerError:
                        self._require_joining([other])
                        raise
            while missing := [other for other in others if other not in met]:
                while not _somebody_calls(self._listening, min(left_s(self._deadline), LOOK_S)):
                    self._require_joining(missing)
                    if time.monotonic() >= self._deadline:
                        break
                peer = _answer(self._listening, *arguments, missing, descriptors, self._deadline)
                met[peer.rank] = peer
        except BaseException as error:
            for peer in met.values():
                peer.part(error)
            raise
        return [met[other] for other in others]

    def _require_joining(self, others: Sequence[int]) -> None:
        for other in others:
            require_joining(self._store, self._prefix, self._rank, other)


def _listening(address: str, most: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(address)
        listening.listen(most)
    except OSError:
        listening.close()
        raise
    return listening


def _somebody_calls(listening: socket.socket, timeout_s: float) -> bool:
    return bool(select.select([listening], [], [], timeout_s)[0])


def _call(
    cards: Sequence[Card], rank: int, other: int, descriptors: Sequence[int], deadline: float
) -> Introduced:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(left_s(deadline))
        connection.connect(cards[other].socket)
        _greet(connection, cards, rank, descriptors)
        return _greeted(connection, cards, rank, range(other, other + 1))
    except OSError as error:
        connection.close()
        raise PeerError(
            f"rank {rank} could not meet rank {other} on this host: {error}; it may have ended, or "
            "the two may not see each other's sockets (containers with networks of their own)"
        ) from error
    except BaseException as error:
        _hang_up(connection, error)
        raise


def _answer(
    listening: socket.socket,
    cards: Sequence[Card],
    rank: int,
    missing: Sequence[int],
    descriptors: Sequence[int],
    deadline: float,
) -> Introduced:
    connection = None
    try:
        listening.settimeout(left_s(deadline))
        connection, _ = listening.accept()
        connection.settimeout(left_s(deadline))
        peer = _greeted(connection, cards, rank, missing)
        _greet(connection, cards, rank, descriptors)
    except OSError as error:
        if connection is not None:
            connection.close()
        said = ", ".join(map(str, missing))
        raise PeerError(
            f"rank {rank}: rank {said} did not come to meet it ({error}); has it ended?"
        ) from error
    except BaseException as error:
        if connection is not None:
            _hang_up(connection, error)
        raise
    return peer


def _greet(
    connection: socket.socket, cards: Sequence[Card], rank: int, descriptors: Sequence[int]
) -> None:
    pass_descriptors(connection, HELLO.pack(rank, bytes.fromhex(cards[rank].nonce)), descriptors)


def _greeted(
    connection: socket.socket, cards: Sequence[Card], rank: int, expected: Sequence[int]
) -> Introduced:
    """Take the greeting of one of the expected ranks."""
    hello, descriptors = take_descriptors(connection, 2)
    try:
        if hello.startswith(GOODBYE):
            others = ", ".join(map(str, expected))
            raise PeerError(f"rank {rank}: rank {others} does not join the group{reason_in(hello)}")
        if len(hello) != HELLO.size or len(descriptors) != 2:
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
    return Introduced(
        rank=other,
        connection=connection,
        process=process,
        segment=descriptors[0],
        event=descriptors[1],
    )


def _hang_up(connection: socket.socket, reason: BaseException) -> None:
    say_goodbye(connection, reason)
    connection.close()
