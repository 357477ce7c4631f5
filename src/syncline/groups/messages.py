"""What two ranks of a host tell each other over the connection on which they have met."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections.abc import Sequence

__all__ = ["GOODBYE", "pass_descriptors", "reason_in", "say_goodbye", "take_descriptors"]

GOODBYE = b"goodbye"
"""Begins the last message of a rank to another; why it leaves may follow."""
MOST_BYTES = 1024
"""Of a message."""


def pass_descriptors(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    """Send a message together with open files."""
    rights = array.array("i", descriptors)
    connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def take_descriptors(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Receive a message with up to ``most`` open files.

    Raises:
        OSError: EMFILE: this process cannot have the files.
    """
    space = socket.CMSG_SPACE(most * array.array("i").itemsize)
    message, ancillary, flags, _ = connection.recvmsg(MOST_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    if flags & socket.MSG_CTRUNC and len(found) < most:
        for descriptor in found:
            os.close(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return message, list(found)


def say_goodbye(connection: socket.socket, reason: BaseException | None = None) -> None:
    """Tell a rank that this one leaves, and why if it is for an error."""
    why = "" if reason is None else str(reason) or type(reason).__name__
    with contextlib.suppress(OSError):  # the other has ended before
        connection.send(GOODBYE + why.encode()[: MOST_BYTES - len(GOODBYE)])


def reason_in(goodbye: bytes) -> str:
    """Return what :func:`say_goodbye` said, as the end of a sentence; empty if nothing."""
    why = goodbye.removeprefix(GOODBYE).decode(errors="replace")
    return f": {why}" if why else ""
