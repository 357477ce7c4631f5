"""File descriptors, of which a process may have only so many."""

from __future__ import annotations

import errno
import os
import resource

from syncline.errors import UserError

__all__ = ["USED_UP", "out_of_descriptors", "require_descriptors"]

USED_UP = (errno.EMFILE, errno.ENFILE)
"""By this process, and by all of the machine."""


def require_descriptors(count: int, rank: int) -> None:
    """Do nothing if this process may open so many more files.

    Raises:
        UserError: it may not. Some are free still, so that the other ranks can be told.
    """
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
