"""``Place``: the switch or a host of an emulated cluster, where commands can be run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence

from syncline.testbed.control import Sandbox
from syncline.testbed.process import Completed, Process

__all__ = ["COMMAND_S", "Place"]

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
        """Start a command.

        Args:
            command: and its arguments.
            environment: variables besides those of this process.
            stdin: a descriptor; None is empty.
            stdout: a descriptor; None drops the output.
            stderr: a descriptor; None drops the output.

        Raises:
            UserError: the command cannot be run.
            PeerError: the cluster has ended.
        """
        variables = {**os.environ, **(environment or {})}
        what = f"{command[0]!r} on {self.name}"
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            streams = [nothing if s is None else s for s in (stdin, stdout, stderr)]
            return self._sandbox.start(self._number, command, variables, streams, what)
        finally:
            os.close(nothing)

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
            timeout_s: after this long it is killed.

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
            said = [file.read().decode(errors="replace") for file in (out, err)]
        return Completed(code=code, stdout=said[0], stderr=said[1])
