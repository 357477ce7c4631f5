"""Messages between two ranks of a host, and the files that they pass with them."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import socket

from syncline.errors import UserError

USED_UP = (errno.EMFILE, errno.ENFILE)
"""Errors at the limits of open files: of this process, and of the machine."""


def require_descriptors(count: int, rank: int) -> None:
    """Raise :class:`UserError` if this process may not open this many more files."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open("/", os.O_PATH | os.O_CLOEXEC))  # noqa: PERF401 - all are closed
    except OSError as error:
        reason = out_of_descriptors(rank, error)
        if reason is None:
            raise
        raise reason from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def out_of_descriptors(rank: int, error: OSError) -> UserError | None:
    """Return what to raise if an error says that no more files can be opened, else None."""
    if error.errno not in USED_UP:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UserError(
        f"rank {rank} has run out of file descriptors ({error.strerror}; the limit of its process "
        f"is {most}): raise the limit (ulimit -n), or make fewer groups"
    )


SHUTDOWN = b"goodbye"  # the start of a rank's last message to another; the reason may follow
MOST_BYTES = 1024


def take_descriptors(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Receive a message with up to ``most`` open files; raise EMFILE if it cannot have them."""
    # Not socket.recv_fds, which ignores flags: children would inherit the files.
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


def announce_shutdown(connection: socket.socket, reason: BaseException | None = None) -> None:
    """Notify a rank that this one leaves, with the error that made it leave, if any."""
    why = "" if reason is None else str(reason) or type(reason).__name__
    with contextlib.suppress(OSError):  # the other has ended before
        connection.send(SHUTDOWN + why.encode()[: MOST_BYTES - len(SHUTDOWN)])


def reason_in(message: bytes) -> str:
    """Return the reason in a shutdown message, as the end of a sentence; empty if there is none."""
    why = message.removeprefix(SHUTDOWN).decode(errors="replace")
    return f": {why}" if why else ""
