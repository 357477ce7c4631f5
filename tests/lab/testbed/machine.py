"""What tests ask of the machine: namespaces, and which processes run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from syncline.lab.testbed import absent_because
from tests.programs import ran

SYNCLINE = (sys.executable, "-P", "-c", "from syncline.cli import main; main()")
"""The command line in a process of its own."""


def finished(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return ran(*map(str, command), **environment)


def started(*command: object, session: bool = False, **environment: str) -> subprocess.Popen[str]:
    """Start a command, in a session of its own or not."""
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=session,
    )


def require_namespaces() -> None:
    """Skip where no cluster can be emulated; in CI fail, unless the kernel itself refuses."""
    reason = absent_because()
    if reason is None:
        return
    # Asked without our own code, so that its faults do not pass for the kernel's refusal.
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    asked = finished("unshare", *as_root, "--mount", "--pid", "--net", "true")
    if os.environ.get("CI") and asked.returncode == 0:
        pytest.fail(f"{reason}; the emulated cluster must be tested in CI")
    pytest.skip(reason)


Identity = tuple[int, str]  # a process, with when it started: numbers are used again


def _stat(process: int) -> tuple[int, Identity] | None:
    """Return the parent and the identity of a process, or None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[1]), (process, fields[19])) if fields[0] != "Z" else None


def descendants(process: int) -> set[Identity]:
    """Return all processes that a process has started, and those that they have started."""
    known = {
        number: stat
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (stat := _stat(number := int(entry.name)))
    }
    found: set[Identity] = set()
    parents = {process}
    while parents:
        children = {n for n, (parent, _) in known.items() if parent in parents}
        found |= {known[n][1] for n in children}
        parents = children
    return found


def alive(identity: Identity) -> bool:
    stat = _stat(identity[0])
    return stat is not None and stat[1] == identity


def runs(process: int) -> bool:
    return _stat(process) is not None


def networks(processes: Iterable[int] | None = None) -> set[str]:
    """Return the network namespaces of processes, of all by default, but for this one's own."""
    if processes is None:
        processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            found.add(os.readlink(f"/proc/{process}/ns/net"))  # noqa: PTH115
    return found - {os.readlink("/proc/self/ns/net")}  # noqa: PTH115


def devices() -> str:
    """Return the machine's own network devices and named namespaces."""
    return finished("sh", "-c", "ls /sys/class/net; ls /run/netns 2>/dev/null").stdout
