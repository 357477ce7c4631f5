"""The system calls behind an emulated cluster, and what to do where the machine refuses them.

A call that the kernel refuses raises an OSError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import sys
from pathlib import Path

from syncline.errors import UserError

# CLONE_NEW... of <linux/sched.h>; os has them only since Python 3.12.
MOUNTS = 0x00020000
NAMES = 0x04000000
IPC = 0x08000000
USERS = 0x10000000
PROCESSES = 0x20000000
NETWORK = 0x40000000

# <linux/mount.h>
RESTRICTED = 2 | 4 | 8  # no setuid, no devices, no execution
BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 0x40000

_PR_SET_PDEATHSIG = 1
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """Move this process into new namespaces of the given kinds."""
    _checked(_libc.unshare(ctypes.c_int(kinds)))


def setns(descriptor: int) -> None:
    """Move this process into the namespace of a file in ``/proc/PID/ns``."""
    _checked(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(0)))


def mount(
    source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None
) -> None:
    """Mount a file system; the error of a refusal names the target."""
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _checked(_libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), target)


def set_domain_name(name: str) -> None:
    """Set the NIS domain name of this process's UTS namespace, of up to 64 letters."""
    text = name.encode()
    _checked(_libc.setdomainname(text, ctypes.c_size_t(len(text))))


def die_with_parent() -> None:
    """Have this process killed when the process that started it ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def may_make_namespaces() -> bool:
    """Return whether this process may make network namespaces without a user namespace."""
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    return bool(held >> _CAP_NET_ADMIN & 1 and held >> _CAP_SYS_ADMIN & 1)


def _checked(result: int, name: str | None = None) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"  # of iproute2, often not in a user's PATH
TOOLS = ("ip", "tc")
SETTINGS = (
    ("kernel.unprivileged_userns_clone", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "0"),
)
"""What may keep users from making namespaces, by sysctl's name, with the value that allows it."""


def tool(name: str) -> str | None:
    """Return the path of a program of the system, or None."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}")


def require_tools() -> None:
    """Raise a UserError if this is not Linux with iproute2."""
    if sys.platform != "linux":
        raise UserError(f"an emulated cluster needs Linux, this is {sys.platform}")
    missing = [name for name in TOOLS if tool(name) is None]
    if missing:
        raise UserError(
            f"an emulated cluster needs {' and '.join(missing)} of iproute2, not found on this "
            "machine; install it, on Debian and Ubuntu with: apt-get install iproute2"
        )


def refusal(what: str, number: int, reason: str, *, rootless: bool) -> str:
    """Return the error for a kernel that refuses ``what``: why there is no cluster, what to do."""
    if not rootless:
        return (
            f"this machine refuses {what} for an emulated cluster, even to root ({reason}); in a "
            "container, start it with --privileged"
        )
    closed = [f"{name}={value}" for name, value in SETTINGS if setting(name) not in (None, value)]
    if number == errno.ENOSPC:
        closed.append("user.max_user_namespaces=10000")
    allow = f", or allow them with: sysctl -w {' '.join(closed)}" if closed else ""
    return (
        f"an emulated cluster needs root, or user namespaces, which this machine refuses "
        f"({what}: {reason}); run it with sudo{allow}"
    )


def setting(name: str) -> str | None:
    """Return the value of a setting by sysctl's name; None where there is no such setting."""
    try:
        return Path("/proc/sys", name.replace(".", "/")).read_text().strip()
    except OSError:
        return None
