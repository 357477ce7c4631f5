"""The caller's side of a sandbox: its places, and the commands that run there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
from syncline.lab.processes import end_of
from syncline.lab.testbed import kernel
from syncline.lab.testbed.cluster import Cluster
from syncline.lab.testbed.kernel import refusal, require_tools
from syncline.lab.testbed.sandbox import FAILED, READY, SMALL_BYTES

START_S = 30.0  # to make or remove namespaces, which takes the kernel far below a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that has ended."""

    code: int  # its exit code, or minus the number of the signal that ended it
    stdout: str
    stderr: str


class Process(contextlib.AbstractContextManager["Process"]):
    """A command that was started in a place.

    It can be given to ``select``: it becomes readable once the command has ended.
    """

    def __init__(self, control: socket.socket, what: str) -> None:
        self._control = control
        self._what = what
        self.code: int | None = None
        """None while it runs; then its exit code, or minus the signal that ended it."""
        self.ended_at_ns = 0  # on the monotonic clock
        answer = self._receive(START_S, "start")
        if "failed" in answer:
            self._control.close()
            raise UserError(f"{what} cannot be run: {answer['failed']}; check the command")

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._control.fileno()

    def send_signal(self, number: int) -> None:
        """Send a signal to the command and all that it has started, as a terminal does."""
        if self.code is None:
            with contextlib.suppress(OSError):  # it has just ended, and says so itself
                self._control.send(str(int(number)).encode())

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; return :attr:`code`.

        Raises:
            PeerError: it did not end in time and was killed, or the cluster has ended.
        """
        if self.code is None:
            answer = self._receive(timeout_s, "end")
            self.code, self.ended_at_ns = answer["ended"], answer["at_ns"]
            self._control.close()
        return self.code

    def terminate(self) -> None:
        """Send SIGTERM to the command and all that it has started."""
        self.send_signal(signal.SIGTERM)

    def close(self, deadline_s: float = 0.0) -> int:
        """Wait for the command until the deadline; then kill it and all that it has started.

        Returns :attr:`code`; of a command that was killed here or in :meth:`wait`, -9.
        """
        if self.code is None and self.fileno() >= 0:
            with contextlib.suppress(PeerError):
                return self.wait(deadline_s - time.monotonic())
        self._control.close()
        return -signal.SIGKILL if self.code is None else self.code

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, timeout_s: float, what: str) -> dict[str, Any]:
        self._control.settimeout(max(timeout_s, 1e-3))
        try:
            message = self._control.recv(SMALL_BYTES)
        except TimeoutError:
            self._control.close()
            raise PeerError(
                f"{self._what} did not {what} within {timeout_s:g} s and was killed"
            ) from None
        except ConnectionError:
            message = b""
        if not message:
            self._control.close()
            raise PeerError(lost(self._what))
        answer: dict[str, Any] = json.loads(message)
        return answer


def lost(what: str) -> str:
    """Return the message for a command whose cluster has ended."""
    return f"{what} was lost: the emulated cluster was ended from outside"


PROGRAM = "import sys; from syncline.lab.testbed.sandbox import main; sys.exit(main())"
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
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.namespaces: list[str] = []
        """The path of each host's network namespace, as the switch sees it."""
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        require_tools()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(START_S)
        rootless = not kernel.may_make_namespaces()
        processors = sorted(os.sched_getaffinity(0))
        hosts = range(self._cluster.hosts)
        settings = {
            "rootless": rootless,
            "domain": self._cluster.domain,
            "names": [self._cluster.name_of(h) for h in hosts],
            "addresses": [self._cluster.address_of(h) for h in hosts],
            "processors": [self._cluster.processors_of(h, processors) for h in hosts],
        }
        self._errors = tempfile.TemporaryFile()
        with theirs:
            self._process = subprocess.Popen(
                # -P: a module in the working folder must not shadow one of Python's.
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno()), json.dumps(settings)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the caller to pass on
            )
        try:
            answer = self._hello()
            if FAILED in answer:
                raise UserError(refusal(*answer[FAILED], rootless=rootless))
        except BaseException:
            self.__exit__()
            raise
        self.namespaces = answer[READY]
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

    def keep(self, process: Process) -> None:
        """Let a command go on until the cluster ends, even if its handle is dropped."""
        self._processes = [p for p in self._processes if p.code is None] + [process]


COMMAND_S = 60.0  # how long a command may take unless said otherwise


class Place:
    """Somewhere to run commands: the switch, which is place 0, or host i, which is place i + 1."""

    def __init__(self, sandbox: Sandbox, number: int, name: str) -> None:
        self._sandbox = sandbox
        self._number = number
        self.name = name  # ``switch``, ``host0``, ...

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Process:
        """Start a command; ``environment`` is added to the variables of this process.

        Streams are descriptors; None as input is empty, None as output drops it.

        Raises:
            UserError: the command cannot be run.
            PeerError: the cluster has ended.
        """
        wanted = {
            "place": self._number,
            "command": list(command),
            "environment": {**os.environ, **(environment or {})},
            "folder": os.getcwd(),  # noqa: PTH109
        }
        what = f"{command[0]!r} on {self.name}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with (
            theirs,
            tempfile.TemporaryFile() as request,
            Path(os.devnull).open("r+b", buffering=0) as nothing,
        ):
            request.write(json.dumps(wanted).encode())
            request.seek(0)
            streams = [nothing.fileno() if s is None else s for s in (stdin, stdout, stderr)]
            descriptors = [request.fileno(), theirs.fileno(), *streams]
            try:
                socket.send_fds(self._sandbox.connection, [b"start"], descriptors)
            except OSError:
                ours.close()
                raise PeerError(lost(what)) from None
        process = Process(ours, what)
        self._sandbox.keep(process)
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        text: str = "",
        timeout_s: float = COMMAND_S,
    ) -> Completed:
        """Run a command to its end; return how it ended and what it printed.

        ``environment`` is added to that of this process, and ``text`` is the standard input. It
        raises as :meth:`start` does, and a PeerError if the command does not end in time.
        """
        with contextlib.ExitStack() as stack:
            given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
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
