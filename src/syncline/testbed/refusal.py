"""What a machine must have for an emulated cluster, and the sentence that says what is missing."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

from syncline.errors import UserError

__all__ = ["refusal", "require_tools", "tool"]

SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where iproute2 lies; often missing from the PATH of users who are not root."""
TOOLS = ("ip", "tc")
SETTINGS = (
    ("kernel/unprivileged_userns_clone", "1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "0"),
)
"""What may keep users from making namespaces, each in /proc/sys, with the value that allows it."""


def tool(name: str) -> str | None:
    """Return the path of a program of the system, or None."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}")


def require_tools() -> None:
    """Check that this is Linux with iproute2.

    Raises:
        UserError: it is not.
    """
    if sys.platform != "linux":
        raise UserError(f"an emulated cluster needs Linux, this is {sys.platform}")
    missing = [name for name in TOOLS if tool(name) is None]
    if missing:
        raise UserError(
            f"an emulated cluster needs {' and '.join(missing)} of iproute2, not found on this "
            "machine; install it, on Debian and Ubuntu with: apt-get install iproute2"
        )


def refusal(what: str, number: int, reason: str, *, rootless: bool) -> str:
    """Return the sentence that says why there is no cluster and what to do.

    Args:
        what: was to be made.
        number: of the kernel's error.
        reason: the kernel's words for it.
        rootless: whether it was tried in a user namespace.
    """
    if not rootless:
        return (
            f"this machine refuses {what} for an emulated cluster ({reason}), though to root; in a "
            "container, start it with --privileged"
        )
    closed = [
        f"{path.replace('/', '.')}={value}"
        for path, value in SETTINGS
        if _setting(path) not in (None, value)
    ]
    if number == errno.ENOSPC:
        closed.append("user.max_user_namespaces=10000")
    allow = f", or allow them with: sysctl -w {' '.join(closed)}" if closed else ""
    return (
        f"an emulated cluster needs root, or user namespaces, which this machine refuses "
        f"({what}: {reason}); run it with sudo{allow}"
    )


def _setting(path: str) -> str | None:
    try:
        return Path("/proc/sys", path).read_text().strip()
    except OSError:
        return None
