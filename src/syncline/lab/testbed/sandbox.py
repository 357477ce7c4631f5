"""The process under which all processes of an emulated cluster run.

It makes namespaces of its own for processes, mounts and the network, and in them one set of
namespaces for every host. In its process namespace it is process 1: when it ends, the kernel kills
every process of the cluster, and with the last of them all namespaces, bridges and links go. It
ends when its connection to the process that asked for the cluster is closed, which the kernel does
however that process ends. So nothing is ever left behind. The machine's network does not see the
cluster, and two clusters cannot meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from syncline.lab.processes import reason_of
from syncline.lab.testbed import kernel

READY = "ready"
FAILED = "failed"
SWITCH_PLACE = 0  # the switch is place 0; host i is place i + 1

IPV6_OFF = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")

CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
CONGESTION_CONTROLS = ("cubic", "reno")  # the second where the kernel refuses the first

KINDS = ("net", "mnt", "uts", "ipc")  # each host's own namespaces, as in /proc/self/ns
HOST_KINDS = kernel.NETWORK | kernel.MOUNTS | kernel.NAMES | kernel.IPC
SMALL_BYTES = 4096

Place = tuple[int, ...]  # descriptors of a place's namespaces


class _Failure(Exception):
    """A step of the set-up that the kernel refused."""


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Failure(what, error.errno, error.strerror) from error


def main() -> int:
    """Make the cluster's namespaces and serve; its caller is in ``.control``."""
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
                _disable_ipv6()
            kernel.set_domain_name(settings["domain"])  # the hosts' namespaces inherit it
            places = _make_places(settings["names"], settings["addresses"])
            paths = [f"/proc/1/fd/{place[0]}" for place in places[1:]]
            connection.send(json.dumps({READY: paths}).encode())
            _Server(connection, places, settings["processors"]).serve()
            return 0
    except _Failure as failure:
        connection.send(json.dumps({FAILED: failure.args}).encode())
        return 1
    connection.close()
    # Returns only after the kernel has killed every other process of the process namespace.
    os.waitpid(first, 0)
    return 0


def _disable_ipv6() -> None:
    """Keep IPv6 off the devices to come, so that links carry nothing but what the job sends."""
    if IPV6_OFF.exists():
        IPV6_OFF.write_text("1")


def _become_root_of_a_user_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    with _step("a user namespace"):
        kernel.unshare(kernel.USERS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _control_congestion() -> None:
    """Set TCP as on most hosts; BBR, for one, sends next to nothing for 0.2 s every 10 s."""
    usual, always_allowed = CONGESTION_CONTROLS
    try:
        CONGESTION.write_text(usual)
    except OSError:
        CONGESTION.write_text(always_allowed)


def _make_places(names: list[str], addresses: list[str]) -> list[Place]:
    """Return the switch, where this process stays, and the hosts."""
    switch = _own_namespaces()
    places = [switch]
    # Both forms of an address: a socket for IPv4 and IPv6 knows its peers by the second.
    table = "127.0.0.1 localhost\n" + "".join(
        f"{address} {name}\n::ffff:{address} {name}\n"
        for name, address in zip(names, addresses, strict=True)
    )
    for name in names:
        with _step(f"the namespaces of {name}"):
            kernel.unshare(HOST_KINDS)
            _set_up_host(name, table)
        places.append(_own_namespaces())
        for descriptor in switch:
            kernel.setns(descriptor)
    return places


def _own_namespaces() -> Place:
    return tuple(os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in KINDS)


def _set_up_host(name: str, table: str) -> None:
    """Set up a host's name, shared memory, /sys with its own network devices, and /etc/hosts.

    Programs compare names and shared memory to find out whether they are on one host: NCCL and UCX
    would otherwise bypass the network.
    """
    _disable_ipv6()
    _control_congestion()
    socket.sethostname(name)
    kernel.mount("sysfs", "/sys", "sysfs", kernel.RESTRICTED)
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", kernel.RESTRICTED, "mode=1777")
    if Path("/etc/hosts").exists():
        hosts = Path("/dev/shm/hosts")
        hosts.write_text(table)
        kernel.mount(str(hosts), "/etc/hosts", flags=kernel.BIND)
        hosts.unlink()


class _Server:
    """Starts commands in places, passes signals on to them, and says how they end."""

    def __init__(
        self, connection: socket.socket, places: list[Place], processors: list[list[int]]
    ) -> None:
        self._connection = connection
        self._places = places
        self._processors = processors  # of each host: the processors that its commands may use
        self._controls: dict[int, socket.socket] = {}  # process id -> socket to its caller
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Return when the connection is closed."""
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(woken, selectors.EVENT_READ)
        self._selector.register(self._connection, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is woken:
                    woken.recv(SMALL_BYTES)
                    self._reap()
                elif key.fileobj is not self._connection:
                    self._control(key.data)
                elif not self._accept():
                    return

    def _accept(self) -> bool:
        """Start the next command; return False if there will be none."""
        message, descriptors, _, _ = socket.recv_fds(self._connection, SMALL_BYTES, 5)
        if not message:
            return False
        request, control, *streams = descriptors
        with os.fdopen(request, "rb") as file:
            wanted = json.loads(file.read())
        self._start(wanted, socket.socket(fileno=control), streams)
        for stream in streams:
            os.close(stream)
        return True

    def _start(self, wanted: dict[str, Any], control: socket.socket, streams: list[int]) -> None:
        number = wanted["place"]
        place = self._places[number]

        def enter() -> None:
            for descriptor in place:
                kernel.setns(descriptor)
            if number != SWITCH_PLACE:
                os.sched_setaffinity(0, self._processors[number - 1])
            os.chdir(wanted["folder"])  # another mount namespace begins at its root
            # A shell has background jobs ignore this signal, and children inherit that.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        try:
            process = subprocess.Popen(
                wanted["command"],
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                env=wanted["environment"],
                start_new_session=True,
                preexec_fn=enter,  # safe: this process has one thread
            )
        except (OSError, subprocess.SubprocessError) as error:
            _answer(control, failed=reason_of(error, wanted["command"][0], wanted["environment"]))
            control.close()
            return
        process.returncode = 0  # all children are reaped in one place
        self._controls[process.pid] = control
        self._selector.register(control, selectors.EVENT_READ, process.pid)
        _answer(control, started=process.pid)

    def _control(self, process: int) -> None:
        """Pass on a signal; if the caller has gone, kill."""
        control = self._controls.get(process)
        if control is None:
            return
        try:
            message = control.recv(SMALL_BYTES)
        except ConnectionError:
            message = b""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, int(message or signal.SIGKILL))
        if not message:
            self._forget(process)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there is none
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                process, status = ended
                control = self._controls.get(process)
                if control is not None:  # otherwise an orphan, which the kernel gave to process 1
                    code = os.waitstatus_to_exitcode(status)
                    _answer(control, ended=code, at_ns=time.monotonic_ns())
                    self._forget(process)

    def _forget(self, process: int) -> None:
        control = self._controls.pop(process)
        self._selector.unregister(control)
        control.close()


def _answer(control: socket.socket, **words: Any) -> None:
    with contextlib.suppress(ConnectionError):  # nobody listens any more
        control.send(json.dumps(words).encode())
