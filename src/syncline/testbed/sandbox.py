"""The process that everything on an emulated cluster lives under.

It makes namespaces of its own for processes, mounts and the network, and in them one set of
namespaces for every host. In its process namespace it is process 1: when it ends, the kernel kills
every process of the cluster, and with the last of them all namespaces, bridges and links go. It
ends when its connection to the process that asked for the cluster is closed, which the kernel does
however that process ends. So nothing is ever left behind, and nothing of it is visible in the
network of the machine: two clusters cannot meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from syncline.testbed import kernel

__all__ = ["FAILED", "PLACES", "PROCESS", "SWITCH_PLACE"]

PROCESS = "process"
"""The number of process 1, outside its namespace."""
PLACES = "places"
"""Of each place: the descriptors in process 1 of its namespaces, that of its network first."""
FAILED = "failed"
SWITCH_PLACE = 0
"""The switch is place 0; host i is place i + 1."""

IPV6_OFF = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")

CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
CONGESTION_CONTROLS = ("cubic", "reno")
"""The first that the kernel allows in a network namespace; it always allows the last."""

KINDS = ("net", "mnt", "uts", "ipc")
"""Namespaces that every host has of its own, as ``/proc/self/ns`` calls them."""
HOST_KINDS = kernel.NETWORK | kernel.MOUNTS | kernel.NAMES | kernel.IPC

Place = tuple[int, ...]
"""Descriptors of a place's namespaces."""


class _Failure(Exception):
    """A step of the set-up that the kernel refused."""


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Failure(what, error.errno, error.strerror) from error


def main() -> int:
    """Make the cluster's namespaces and keep them until the connection is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    try:
        if settings["rootless"]:
            _become_root_of_a_user_namespace()
        with _step("namespaces"):
            kernel.unshare(HOST_KINDS | kernel.PROCESSES)
            kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
        first = os.fork()
        if first == 0:
            kernel.die_with_parent()
            with _step("/proc"):
                kernel.mount("proc", "/proc", "proc", kernel.RESTRICTED)
                _keep_quiet()
            kernel.set_domain_name(settings["domain"])  # which the hosts' namespaces begin with
            places = _make_places(settings["names"], settings["addresses"])
            connection.send(json.dumps({PLACES: places}).encode())
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
            connection.recv(1)
            return 0
        connection.send(json.dumps({PROCESS: first}).encode())
    except _Failure as failure:
        connection.send(json.dumps({FAILED: failure.args}).encode())
        return 1
    connection.close()
    # Its end is reported only after the kernel has killed all that it was process 1 of.
    os.waitpid(first, 0)
    return 0


def _keep_quiet() -> None:
    """Keep IPv6 off the devices to come: links carry what the job sends, and nothing else."""
    if IPV6_OFF.exists():
        IPV6_OFF.write_text("1")


def _become_root_of_a_user_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    with _step("a user namespace"):
        kernel.unshare(kernel.USERS)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            Path("/proc/self", name).write_text(text)


def _control_congestion() -> None:
    """Set TCP as on most Linux hosts, independent of this machine's settings.

    BBR, for one, measures the way every 10 s by sending next to nothing for 0.2 s.
    """
    for algorithm in CONGESTION_CONTROLS:
        try:
            CONGESTION.write_text(algorithm)
        except OSError:
            if algorithm == CONGESTION_CONTROLS[-1]:
                raise
        else:
            return


def _make_places(names: list[str], addresses: list[str]) -> list[Place]:
    """Return the switch, where this process stays, and the hosts."""
    switch = _here()
    places = [switch]
    # Both forms of an address: sockets for IPv4 and IPv6 alike know their peers by the second.
    table = "127.0.0.1 localhost\n" + "".join(
        f"{address} {name}\n::ffff:{address} {name}\n"
        for name, address in zip(names, addresses, strict=True)
    )
    for name in names:
        with _step(f"the namespaces of {name}"):
            kernel.unshare(HOST_KINDS)
            _furnish(name, table)
        places.append(_here())
        for descriptor in switch:
            kernel.setns(descriptor)
    return places


def _here() -> Place:
    return tuple(os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in KINDS)


def _furnish(name: str, table: str) -> None:
    """Give a host a name, a view of its own network devices, shared memory and names of hosts.

    Programs compare names and shared memory to find out whether they are on one host: NCCL and UCX
    would otherwise go past the network.
    """
    _keep_quiet()
    _control_congestion()
    socket.sethostname(name)
    kernel.mount("sysfs", "/sys", "sysfs", kernel.RESTRICTED)
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", kernel.RESTRICTED, "mode=1777")
    if Path("/etc/hosts").exists():
        hosts = Path("/dev/shm/hosts")
        hosts.write_text(table)
        kernel.mount(str(hosts), "/etc/hosts", flags=kernel.BIND)
        hosts.unlink()
