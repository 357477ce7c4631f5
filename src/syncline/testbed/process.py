"""Handles of commands that run in an emulated cluster."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from syncline.errors import PeerError, UserError
from syncline.testbed.sandbox import SMALL_BYTES

__all__ = ["START_S", "Completed", "Process", "lost"]

START_S = 30.0
"""For the kernel to make and remove namespaces and processes; it takes far below a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that has ended."""

    code: int
    """Its exit code, or minus the number of the signal that ended it."""
    stdout: str
    stderr: str


class Process:
    """A command that was started in a place.

    It can be selected on: it is readable once the command has ended.
    """

    def __init__(self, control: socket.socket, what: str) -> None:
        self._control = control
        self.what = what
        self.code: int | None = None
        """None while it runs; then its exit code, or minus the signal that ended it."""
        self.ended_at_ns = 0
        """On the monotonic clock."""

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._control.fileno()

    def confirm(self) -> None:
        """Wait until it runs.

        Raises:
            UserError: it cannot be run.
        """
        answer = self._receive(START_S, "start")
        if "failed" in answer:
            self.close()
            raise UserError(f"{self.what} cannot be run: {answer['failed']}; check the command")

    def send_signal(self, number: int) -> None:
        """Send a signal to the command and all that it has started, as a terminal does."""
        if self.code is None:
            try:
                self._control.send(str(int(number)).encode())
            except OSError:
                return  # it has just ended, and says so itself

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; return :attr:`code`.

        Raises:
            PeerError: it has not ended by then, or the cluster has; either way it does not go on.
        """
        if self.code is None:
            answer = self._receive(timeout_s, "end")
            self.code, self.ended_at_ns = answer["ended"], answer["at_ns"]
            self.close()
        return self.code

    def close(self) -> None:
        """Kill it and all that it has started, if it runs."""
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _receive(self, timeout_s: float, what: str) -> dict[str, Any]:
        self._control.settimeout(max(timeout_s, 1e-3))
        try:
            message = self._control.recv(SMALL_BYTES)
        except TimeoutError:
            self.close()
            raise PeerError(
                f"{self.what} did not {what} within {timeout_s:g} s and was killed"
            ) from None
        except ConnectionError:
            message = b""
        if not message:
            self.close()
            raise PeerError(lost(self.what))
        answer: dict[str, Any] = json.loads(message)
        return answer


def lost(what: str) -> str:
    """Return the message for a command whose cluster has ended."""
    return f"{what} was lost: the emulated cluster was ended from outside"
