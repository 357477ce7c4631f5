"""The caller's side of a sandbox: starting it, and running commands in its places."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from syncline.errors import PeerError, UserError
from syncline.processes import end_of
from syncline.testbed import kernel
from syncline.testbed.cluster import Cluster
from syncline.testbed.process import START_S, Process, lost
from syncline.testbed.refusal import refusal, require_tools
from syncline.testbed.sandbox import FAILED, READY

__all__ = ["Sandbox", "absent_because"]

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
        self.namespaces: list[str] = []
        """The path of each host's network namespace, as the switch sees it."""
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        require_tools()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(START_S)
        rootless = not kernel.may_make_namespaces()
        hosts = range(self._cluster.hosts)
        settings = {
            "rootless": rootless,
            "domain": self._cluster.domain,
            "names": [self._cluster.name_of(h) for h in hosts],
            "addresses": [self._cluster.address_of(h) for h in hosts],
        }
        self._errors = tempfile.TemporaryFile()
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
            answer = self._hello()
            if FAILED in answer:
                raise UserError(refusal(*answer[FAILED], rootless=rootless))
        except BaseException:
            self.__exit__(None, None, None)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.close()
        self.connection.close()
        try:
            self._process.wait(START_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._errors.close()

    def start(
        self,
        place: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int],
        what: str,
    ) -> Process:
        """Start a command in a place.

        Args:
            place: 0 is the switch, host i is place i + 1.
            command: and its arguments.
            environment: all of its variables.
            streams: descriptors of its standard input, output and error.
            what: what it is, for messages.

        Raises:
            UserError: there is no such command, or it cannot be run.
            PeerError: the cluster has ended.
        """
        wanted = {
            "place": place,
            "command": list(command),
            "environment": dict(environment),
            "folder": os.getcwd(),  # noqa: PTH109
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as request:
            request.write(json.dumps(wanted).encode())
            request.flush()
            request.seek(0)
            descriptors = [request.fileno(), theirs.fileno(), *streams]
            try:
                socket.send_fds(self.connection, [b"start"], descriptors)
            except OSError:
                ours.close()
                raise PeerError(lost(what)) from None
        process = Process(ours, what)
        process.confirm()
        # Held here, so that one whose handle is dropped goes on running until the cluster ends.
        self._processes = [p for p in self._processes if p.code is None] + [process]
        return process
