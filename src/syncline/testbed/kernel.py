"""What Python's ``os`` does not offer of Linux: namespaces, mounts, and dying with the parent."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

__all__ = [
    "BIND",
    "IPC",
    "MOUNTS",
    "NAMES",
    "NETWORK",
    "PRIVATE",
    "PROCESSES",
    "RECURSIVE",
    "RESTRICTED",
    "USERS",
    "die_with_parent",
    "may_make_namespaces",
    "mount",
    "set_domain_name",
    "setns",
    "unshare",
]

# <linux/sched.h>; os has these only since Python 3.12.
MOUNTS = 0x00020000
NAMES = 0x04000000
IPC = 0x08000000
USERS = 0x10000000
PROCESSES = 0x20000000
NETWORK = 0x40000000

# <linux/mount.h>
RESTRICTED = 2 | 4 | 8
"""No setuid, no devices, no execution."""
BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 0x40000

_PR_SET_PDEATHSIG = 1
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """Move this process into new namespaces of the given kinds.

    Raises:
        OSError: the kernel refuses.
    """
    _checked(_libc.unshare(ctypes.c_int(kinds)))


def setns(descriptor: int) -> None:
    """Move this process into the namespace that a file of ``/proc/PID/ns`` stands for.

    Raises:
        OSError: the kernel refuses.
    """
    _checked(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(0)))


def mount(
    source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None
) -> None:
    """Mount a file system.

    Raises:
        OSError: the kernel refuses; it names the target.
    """
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _checked(_libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), target)


def set_domain_name(name: str) -> None:
    """Set the NIS domain name of this process's namespace of names, of up to 64 letters.

    Raises:
        OSError: the kernel refuses.
    """
    text = name.encode()
    _checked(_libc.setdomainname(text, ctypes.c_size_t(len(text))))


def die_with_parent() -> None:
    """Have this process killed when the process that started it ends.

    Raises:
        OSError: the kernel refuses.
    """
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def may_make_namespaces() -> bool:
    """Return whether this process may make network namespaces without a user namespace."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            held = int(line.split()[1], 16)
            return bool(held >> _CAP_NET_ADMIN & 1 and held >> _CAP_SYS_ADMIN & 1)
    return False


def _checked(result: int, name: str | None = None) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
