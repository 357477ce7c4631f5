"""What a rank's host reports of its network: the interface in use, and retransmissions."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from syncline import _native
from syncline.plan.advice import Interface

INTERFACES = Path("/sys/class/net")
COUNTERS = Path("/proc/net/snmp")
NAMED_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables by which a user names the interface."""


def interface_used() -> Interface | None:
    """Return the interface that this host uses to send to other ranks, if known.

    As Gloo chooses it: the one that a variable names, or whose address the host's name resolves to.
    """
    named = next((os.environ[name] for name in NAMED_BY if os.environ.get(name)), None)
    name = named.split(",")[0].lstrip("=^") if named else _with_own_address()
    if name is None or not (INTERFACES / name).exists():
        return None
    speed = _speed(name)
    up = {
        other: rate
        for _, other in socket.if_nameindex()
        if other not in (name, "lo")
        and (INTERFACES / other / "operstate").read_text().strip() == "up"
        and (rate := _speed(other))
    }
    fastest = max(up, key=lambda other: up[other], default=None)
    is_faster = fastest is not None and speed is not None and up[fastest] > speed
    return Interface(
        name=name,
        bytes_per_s=speed,
        mtu_bytes=int((INTERFACES / name / "mtu").read_text()),
        faster=fastest if is_faster else None,
    )


def segments() -> tuple[int, int]:
    """Return how many TCP segments this host has sent, and how many it has retransmitted."""
    try:
        lines = [line.split() for line in COUNTERS.read_text().splitlines()]
    except OSError:  # not on Linux, or hidden in a container
        return 0, 0
    names, values = (line for line in lines if line[0] == "Tcp:")
    known = dict(zip(names[1:], map(int, values[1:]), strict=True))
    return known["OutSegs"], known["RetransSegs"]


def _with_own_address() -> str | None:
    try:
        own = socket.gethostbyname(socket.gethostname())
    except OSError:  # the name does not resolve
        return None
    return next((name for name, address, _ in _native.interfaces() if address == own), None)


def _speed(name: str) -> float | None:
    """Return an interface's nominal rate in bytes per second; None if its driver does not say."""
    try:
        megabits = int((INTERFACES / name / "speed").read_text())
    except OSError:  # no speed while it is down, or if it is virtual
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None
