"""What a worker of the benchmark and the process that leads it say to each other.

Both ends are Unix sockets that keep messages apart, in a file system that emulated hosts share. A
worker says hello, is told about its crew, and then does one lap after the other.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec

from syncline.collectives import Collective
from syncline.errors import PeerError
from syncline.groups import Transport
from syncline.groups.site import Site
from syncline.model.document import Value

__all__ = [
    "MOST_BYTES",
    "Answer",
    "Failed",
    "Greeting",
    "Hello",
    "Lap",
    "Order",
    "Ready",
    "Remote",
    "Setup",
    "connected",
    "receive",
    "received_orders",
    "send",
]

MOST_BYTES = 1 << 16
Message = TypeVar("Message")


class Hello(Value, frozen=True, kw_only=True, tag="hello"):
    """A worker is there."""

    rank: int
    version: str
    """Of what it measures."""


class Remote(Value, frozen=True, kw_only=True, tag="remote"):
    """An MPI asks for a command to be run on another host, as it would ask ssh."""

    host: str
    command: str


class Setup(Value, frozen=True, kw_only=True):
    """What a worker needs to meet the others of its crew."""

    ranks: int
    store: str
    """A file through which they find each other."""
    transport: Transport
    """Of :class:`~syncline.groups.Group`."""
    choices: Literal["measured", "built-in"]
    """Likewise."""
    timeout_s: float


class Ready(Value, frozen=True, kw_only=True):
    """A worker has met the others of its crew."""

    site: Site | None = None
    """Where Syncline's group is; None for others."""
    choices: str = ""
    """Where the group's choice of algorithms comes from."""


class Order(Value, frozen=True, kw_only=True):
    """One lap: a collective so many times."""

    contestant: str
    collective: Collective
    algorithm: str | None = None
    """None: the contestant's own choice."""
    blocks: int | None = None
    size_bytes: int
    """Of the whole vector, all shards of it."""
    iterations: int
    warmup: int
    """Iterations before them, that are not measured."""


class Lap(Value, frozen=True, kw_only=True, tag="lap"):
    """What a rank measured."""

    wall_s: float
    """All iterations together."""
    cpu_s: float
    """Of all threads of the process."""


class Failed(Value, frozen=True, kw_only=True, tag="failed"):
    """A rank cannot do what it was told; it stays for the next order."""

    reason: str


Greeting: Any = Hello | Remote
"""What comes first on a connection."""
Answer: Any = Lap | Failed
"""What a rank says to an order."""


def connected(path: str, timeout_s: float) -> socket.socket:
    """Return a connection to the leading process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    connection.connect(path)
    return connection


def send(connection: socket.socket, message: Value) -> None:
    """Send a message.

    Raises:
        PeerError: the other end is gone.
    """
    try:
        connection.sendall(msgspec.json.encode(message))
    except OSError as error:
        raise PeerError(f"the other end of the benchmark is gone: {error}") from error


def receive(connection: socket.socket, kind: type[Message], timeout_s: float | None) -> Message:
    """Return the next message.

    Args:
        connection: where it comes from.
        kind: what it must be; a union for one of several.
        timeout_s: how long to wait; None: as long as the other end is there.

    Raises:
        PeerError: none came in time, or the other end is gone.
    """
    connection.settimeout(timeout_s)
    try:
        data = connection.recv(MOST_BYTES)
    except TimeoutError:
        raise PeerError(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise PeerError(f"the other end of the benchmark is gone: {error}") from error
    if not data:
        raise PeerError("the other end of the benchmark is gone")
    return msgspec.json.decode(data, type=kind)


def received_orders(connection: socket.socket) -> Iterator[Order]:
    """Yield orders until the leading process closes the connection."""
    connection.settimeout(None)
    while data := connection.recv(MOST_BYTES):
        yield msgspec.json.decode(data, type=Order)
