"""Connections to ranks of other hosts, over TCP."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from syncline import _native
from syncline.comm.groups.meeting import BACKLOG, Connected, Meeting, Reading, StrangerError
from syncline.comm.groups.messages import USED_UP
from syncline.comm.groups.notes import Notes, decoded, encoded
from syncline.errors import PeerError, UserError
from syncline.plan.document import Value

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the interface, as for Gloo; in a list, the first one that has an address counts."""
CALL_S = 1.0  # how long an attempt to connect takes at most; the next one is to another address
ADVICE = f"interface= or {VARIABLE} names a device that reaches the other hosts"
Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class Place(Value, frozen=True, kw_only=True):
    """Where a rank listens: its note in the store."""

    addresses: tuple[str, ...]
    port: int
    boot: str  # identity of its machine: on the same one it may be called at a loopback address

    def __post_init__(self) -> None:
        for address in self.addresses:
            ipaddress.ip_address(address)


def own_addresses(rank: int, interface: str | None) -> list[Address]:
    """Return the addresses of an interface, or of all; raise UserError if there is none."""
    found = _native.interfaces()
    if named := interface or os.environ.get(VARIABLE):
        for name in named.split(","):
            own = [each for each in found if each[0] == name]
            if own:
                found = own[:1]
                break
        else:
            there = ", ".join(dict.fromkeys(each[0] for each in found)) or "none"
            raise UserError(
                f"rank {rank}: no interface {named!r} is up (found: {there}), or has an address; "
                f"{ADVICE}"
            )
    if not found:
        raise UserError(f"rank {rank}: this host has no network interface that is up")
    return [ipaddress.ip_interface(f"{address}/{bits}") for _, address, bits in found]


def connect(
    notes: Notes,
    names: Sequence[str],
    secret: bytes,
    boot: str,
    others: Sequence[int],
    interface: str | None,
) -> list[Connected]:
    """Connect to ranks of other hosts; both ends of each connection prove that they are ranks.

    ``names`` are those of each rank's host, for errors, and ``boot`` is the identity of this
    machine since it was started. This rank listens at ``interface``; None: that of Gloo's variable,
    else all. Raise PeerError if a rank cannot be reached, or the errors of :func:`own_addresses`.
    """
    own = own_addresses(notes.rank, interface)
    with _listening(own) as listening:
        place = Place(
            addresses=tuple(str(each.ip) for each in own),
            port=listening.getsockname()[1],
            boot=boot,
        )
        notes.leave(f"tcp/{notes.rank}", encoded(place))
        meeting = _Meeting(notes, names, secret, listening)
        for other in others:
            if other < notes.rank:
                note = notes.read(f"tcp/{other}", other)
                theirs = decoded(note, Place, notes.rank, other)
                meeting.ways[other] = ways_to(theirs, own, boot)
        return meeting.meet(others)


@dataclass(slots=True, eq=False, repr=False)
class _Meeting(Meeting[Connected]):
    ways: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """Where each lower rank may be called, most likely first."""
    _errors: dict[int, dict[tuple[str, int], OSError]] = field(default_factory=dict)
    _calls: Counter[int] = field(default_factory=Counter)  # of each rank

    def _admits(self, connection: socket.socket) -> bool:  # noqa: ARG002 - it has to prove it
        return True

    def _call(self, other: int) -> None:
        ways = self.ways[other]
        if not ways:
            raise PeerError(
                f"rank {self._rank}: rank {other} on {self._addresses[other]} listens at a "
                f"loopback address only, which does not leave that host; {ADVICE}"
            )
        way = ways[self._calls[other] % len(ways)]
        self._calls[other] += 1
        try:
            connection = socket.create_connection(way, CALL_S)
        except OSError as error:
            if error.errno in USED_UP:
                raise
            errors = self._errors.setdefault(other, {})
            errors[way] = error
            self._notes.require_joining(other)
            if all(each in errors and errors[each].errno == errno.ECONNREFUSED for each in ways):
                raise PeerError(f"rank {self._rank}: {self._advice()}") from error
            return
        self._called[other] = connection
        self._begin(connection, self._calling(connection, other))

    def _advice(self) -> str:
        tried = [
            f"{address} port {port}: {error.strerror or error}"
            for other in sorted(self._missing)
            for (address, port), error in self._errors.get(other, {}).items()
        ]
        who = ", ".join(f"rank {rank} on {self._addresses[rank]}" for rank in sorted(self._missing))
        return (
            f"no connection to {who} ({'; '.join(tried) or 'it did not call'}); see its output "
            f"whether it has ended, and whether the hosts have a network in common: {ADVICE}"
        )

    def _take(self, connection: socket.socket, size_bytes: int) -> Reading:
        taken = b""
        while True:
            part = connection.recv(size_bytes - len(taken))
            taken += part
            if len(taken) == size_bytes:
                return taken, []
            if not part:
                raise StrangerError
            yield

    def _introduced(
        self, connection: socket.socket, other: int, known: bool, passed: list[int]
    ) -> Connected:
        del passed  # none are
        if not known:
            raise StrangerError
        return Connected(rank=other, connection=connection)


def _listening(own: Sequence[Address]) -> socket.socket:
    """Return a socket that listens at the only address or, if there are several, at all."""
    if len(own) == 1:
        family = socket.AF_INET if own[0].version == 4 else socket.AF_INET6
        listening = socket.create_server((str(own[0].ip), 0), family=family, backlog=BACKLOG)
    elif socket.has_dualstack_ipv6():
        listening = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    else:
        listening = socket.create_server(("", 0), backlog=BACKLOG)
    listening.setblocking(False)
    return listening


def ways_to(place: Place, own: Sequence[Address], boot: str) -> list[tuple[str, int]]:
    """Return where to call a rank: first in networks of this host, last at this host's addresses.

    An address that both hosts have belongs to a bridge for containers, or they are one machine.
    """
    mine = {each.ip for each in own}
    theirs = [ipaddress.ip_address(address) for address in place.addresses]
    reachable = [each for each in theirs if not each.is_loopback or place.boot == boot]
    reachable.sort(key=lambda it: (it in mine, not any(it in each.network for each in own)))
    return [(str(each), place.port) for each in reachable]
