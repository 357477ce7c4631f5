"""A sandbox from the caller's side: its places, and the commands that run there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from syncline.errors import PeerError, UserError
from syncline.processes import LocalProcess, end_of, readable
from syncline.testbed import kernel
from syncline.testbed.cluster import Cluster
from syncline.testbed.kernel import refusal, require_tools
from syncline.testbed.sandbox import FAILED, PLACES, PROCESS, SWITCH_PLACE

__all__ = ["START_S", "Completed", "Place", "Process", "Sandbox", "absent_because"]

START_S = 30.0
"""For the kernel to make and remove namespaces and processes; it takes far below a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that has ended."""

    code: int
    """Its exit code, or minus the number of the signal that ended it."""
    stdout: str
    stderr: str


ENTER = """
import ctypes, os, signal, sys, time
namespaces, processors, folder, ends, place, *command = sys.argv[1:]
ends = int(ends)
os.set_inheritable(ends, False)
libc = ctypes.CDLL(None, use_errno=True)
for descriptor in [os.open(path, os.O_RDONLY) for path in namespaces.split()]:
    if libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
os.sched_setaffinity(0, map(int, processors.split()))
os.chdir(folder)  # another mount namespace begins at its root
# Signals to the group are for the command.
before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
child = os.fork()  # a namespace of processes is for children only
if not child:
    # A shell starts what runs in the background with SIGINT ignored; Python ignores the others.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\\n".encode())
        os._exit(126)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os.pwrite(ends, time.monotonic_ns().to_bytes(8, "little"), int(place))
if code < 0:
    PR_SET_DUMPABLE = 4
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the command has left its core
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
os._exit(code)
"""
"""Runs a command in the namespaces of a place, notes when it ends, and ends likewise.

The order in which commands end is known by these times only: this program ends a little later."""
TIME_BYTES = 8


class Process(LocalProcess):
    """A command that was started in a place."""

    def __init__(
        self, sandbox: Sandbox, place: int, what: str, command: Sequence[str], **settings: Any
    ) -> None:
        self._sandbox = sandbox
        self._what = what
        self._number = sandbox.started = sandbox.started + 1
        self.ended_at_ns = 0
        """On the monotonic clock; known once it was waited for."""
        ends = sandbox.ends.fileno()
        program = [ENTER, *sandbox.entry(place), str(ends), str(self._number * TIME_BYTES)]
        super().__init__(command, program=program, kept=[ends], **settings)

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; return its exit code, or minus the signal that ended it.

        Raises:
            PeerError: it has not ended by then, or the cluster has; either way it does not go on.
        """
        if not (self.ended or self._ends_by(time.monotonic() + timeout_s)):
            self.close()
            raise PeerError(f"{self._what} did not end within {timeout_s:g} s and was killed")
        code = self._reaped()
        noted = os.pread(self._sandbox.ends.fileno(), TIME_BYTES, self._number * TIME_BYTES)
        # Nothing was noted where the one that waits was killed, too.
        self.ended_at_ns = int.from_bytes(noted, "little") or time.monotonic_ns()
        if code != 0:
            self._sandbox.require_alive(self._what)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


PROGRAM = "import sys; from syncline.testbed.sandbox import main; sys.exit(main())"
LARGEST_ANSWER_BYTES = 1 << 16


def absent_because() -> str | None:
    """Return why no cluster can be emulated on this machine, or None where one can."""
    try:
        with Sandbox(Cluster(hosts=1)):
            return None
    except UserError as error:
        return str(error)


class Sandbox:
    """Namespaces for the hosts and the switch of a cluster, without any links yet.

    They are made on entry and gone on exit, with every process in them.

    Raises:
        UserError: on entry, if the machine has not what it takes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._processors = sorted(os.sched_getaffinity(0))
        self._processes: list[Process] = []
        self.started = 0
        """Commands so far."""

    def __enter__(self) -> Self:
        require_tools()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(START_S)
        self._rootless = rootless = not kernel.may_make_namespaces()
        hosts = range(self._cluster.hosts)
        settings = {
            "rootless": rootless,
            "domain": self._cluster.domain,
            "names": [self._cluster.name_of(h) for h in hosts],
            "addresses": [self._cluster.address_of(h) for h in hosts],
        }
        self._errors, self.ends = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        with theirs:
            self._process = subprocess.Popen(
                # -P: a module in the working folder must not take the place of one of Python's.
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno()), json.dumps(settings)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the caller to pass on
            )
        try:
            answer: dict[str, Any] = {}
            while not answer.keys() >= {PROCESS, PLACES}:
                answer |= self._hello()
                if FAILED in answer:
                    raise UserError(refusal(*answer[FAILED], rootless=rootless))
        except BaseException:
            self.__exit__()
            raise
        self._first: int = answer[PROCESS]
        self._places: list[list[int]] = answer[PLACES]
        return self

    def _hello(self) -> dict[str, Any]:
        try:
            message = self.connection.recv(LARGEST_ANSWER_BYTES)
        except TimeoutError:
            raise PeerError(
                f"the emulated cluster was not ready within {START_S:.0f} s; try again"
            ) from None
        if not message:
            self._process.wait(START_S)
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
            raise PeerError(f"the emulated cluster {end_of(self._process.returncode)}: {said}")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()
        self.connection.close()
        try:
            self._process.wait(START_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._errors.close()
            self.ends.close()

    @property
    def networks(self) -> list[str]:
        """The path of each host's network namespace, as the switch sees it."""
        return [f"/proc/1/fd/{place[0]}" for place in self._places[1:]]

    def entry(self, place: int) -> list[str]:
        """Return the arguments of ``ENTER`` for a place: 0 is the switch, host i is place i + 1."""
        of_first = ["ns/user", "ns/pid"] if self._rootless else ["ns/pid"]
        names = [*of_first, *(f"fd/{descriptor}" for descriptor in self._places[place])]
        processors = self._processors
        if place != SWITCH_PLACE:
            processors = self._cluster.processors_of(place - 1, processors)
        folder = os.getcwd()  # noqa: PTH109
        namespaces = [f"/proc/{self._first}/{name}" for name in names]
        return [" ".join(namespaces), " ".join(map(str, processors)), folder]

    def require_alive(self, what: str) -> None:
        """Check that the cluster has not ended; ``what`` needs it.

        Raises:
            PeerError: it has.
        """
        if readable(self.connection.fileno(), 0):
            raise PeerError(f"{what} was lost: the emulated cluster was ended from outside")

    def start(self, place: int, what: str, command: Sequence[str], **settings: Any) -> Process:
        """Start a command in a place; ``what`` names it in messages.

        Raises:
            UserError: there is no such command.
            PeerError: the cluster has ended.
        """
        self.require_alive(what)
        if shutil.which(command[0], path=settings["environment"].get("PATH")) is None:
            reason = os.strerror(errno.EACCES if Path(command[0]).exists() else errno.ENOENT)
            raise UserError(f"{what} cannot be run: {reason}; check the command")
        process = Process(self, place, what, command, **settings)
        # Held here, so that one whose handle is dropped goes on running until the cluster ends.
        self._processes = [p for p in self._processes if p.code is None] + [process]
        return process


COMMAND_S = 60.0
"""How long a command may take unless said otherwise."""


class Place:
    """The switch or a host: somewhere to run commands.

    Attributes:
        name: ``switch``, ``host0``, ...
    """

    def __init__(self, sandbox: Sandbox, number: int, name: str) -> None:
        self._sandbox = sandbox
        self._number = number
        self.name = name

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Process:
        """Start a command, with variables besides those of this process.

        Streams are descriptors; None as input is empty, None as output drops it.

        Raises:
            UserError: the command cannot be run.
            PeerError: the cluster has ended.
        """
        variables = {**os.environ, **(environment or {})}
        nothing = subprocess.DEVNULL
        return self._sandbox.start(
            self._number,
            f"{command[0]!r} on {self.name}",
            command,
            environment=variables,
            stdin=nothing if stdin is None else stdin,
            stdout=nothing if stdout is None else stdout,
            stderr=nothing if stderr is None else stderr,
        )

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        text: str = "",
        timeout_s: float = COMMAND_S,
    ) -> Completed:
        """Run a command to its end; return how it ended and what it printed.

        Args:
            command: and its arguments.
            environment: variables besides those of this process.
            text: its standard input.
            timeout_s: it is killed after this long.

        Raises:
            UserError: the command cannot be run.
            PeerError: it did not end in time, or the cluster has ended.
        """
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            given.write(text.encode())
            given.seek(0)
            with self.start(
                command,
                environment=environment,
                stdin=given.fileno(),
                stdout=out.fileno(),
                stderr=err.fileno(),
            ) as process:
                code = process.wait(timeout_s)
            out.seek(0)
            err.seek(0)
            printed, said = (file.read().decode(errors="replace") for file in (out, err))
        return Completed(code=code, stdout=printed, stderr=said)
