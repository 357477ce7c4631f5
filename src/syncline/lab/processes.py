"""Worker processes: how they are started and ended, and a folder for their temporary files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

TIED = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):  # else the parent has ended already
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Program that asks the kernel to kill it when its parent ends, and then executes a command. Python
code between fork and exec could do so too, but can deadlock if the parent has threads."""


def reason_of(error: Exception, command: str, environment: dict[str, str]) -> str:
    """Return why a command cannot be run; that it does not exist, if no folder of PATH has it.

    The kernel's error would be about a folder of PATH that may not be read, if there is one.
    """
    if isinstance(error, PermissionError) and not (
        "/" in command
        or any(
            os.path.exists(os.path.join(folder, command))  # noqa: PTH110, PTH118 - never raises
            for folder in os.get_exec_path(environment)
        )
    ):
        return os.strerror(errno.ENOENT)
    return getattr(error, "strerror", None) or str(error)


class LocalProcess:
    """A process of this host that ends with the process that started it, even if that is killed.

    It has its own session, so that Ctrl-C reaches only the process that started it. It can be given
    to ``select``: it becomes readable once the command has ended. ``environment`` is added to that
    of this process. Streams are file descriptors; None inherits the stream of this process.

    The kernel ties a process to the thread that started it, so that thread must outlive it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        tied = [sys.executable, "-I", "-S", "-c", TIED, str(os.getpid())]
        self._popen = subprocess.Popen(
            [*tied, *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._ended = os.pidfd_open(self._popen.pid)

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._ended

    def terminate(self) -> None:
        """Send SIGTERM to the command and all that it has started."""
        if self._popen.returncode is None:
            os.killpg(self._popen.pid, signal.SIGTERM)

    def close(self, deadline_s: float) -> int:
        """Wait for the command until the deadline; then kill it and all that it has started.

        Returns the exit code, or minus the number of the signal that ended it.
        """
        if self._popen.returncode is None:
            select.select([self], [], [], max(deadline_s - time.monotonic(), 0))
            # It was not waited for yet, so no other process group can have its number.
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
            os.close(self._ended)
        return self._popen.returncode


def threads_a_worker(workers: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that divide the cores among workers; none if the user has set them."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // workers))}


def place_variables(*, rank: int, workers: int, workers_per_host: int) -> dict[str, str]:
    """Return torchrun's variables for a worker; ranks fill one host after the other."""
    host, local_rank = divmod(rank, workers_per_host)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers_per_host,
        "NODE_RANK": host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": workers // workers_per_host,
    }
    return {name: str(number) for name, number in numbers.items()}


def end_of(code: int) -> str:
    """Return in words how a process ended; a negative code is minus the number of a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"was ended by signal {-code}"
    return f"was ended by {name} (signal {-code})"


def exit_code_of(code: int) -> int:
    """Return what a shell reports for a process: 128 plus the number of the signal, if any."""
    return code if code >= 0 else 128 - code


@contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the ending signals; restore their handlers at the end."""
    before = {number: signal.getsignal(number) for number in _not_ignored()}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let the first ending signal raise an exception here, and ignore further ones.

    So the code in this context ends its workers and removes its files, even if Ctrl-C is pressed
    several times. SIGINT raises a KeyboardInterrupt, the others a SystemExit with the code that a
    shell reports.
    """

    def leave(number: int, _: FrameType | None) -> None:
        for ending in _not_ignored():
            signal.signal(ending, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(exit_code_of(-number))

    with handled_signals(leave):
        yield


def _not_ignored() -> list[signal.Signals]:
    """Return the ending signals, without SIGHUP if nohup has this process ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in ENDING_SIGNALS if not (ignored and number == signal.SIGHUP)]


@contextmanager
def received_signals() -> Iterator[socket.socket]:
    """Yield a socket that gets the ending signals' numbers, a byte each, in the main thread."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    with reading, writing:
        before = signal.set_wakeup_fd(writing.fileno())
        try:
            with handled_signals(lambda *_: None):
                yield reading
        finally:
            signal.set_wakeup_fd(before)


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder that only this user can enter; remove it at the end.

    Folders of commands that were killed are removed as well. Each command holds a lock on its
    folder, which the kernel releases when the process ends. Names are random, so that no other
    user can take them beforehand.
    """
    prefix = f"syncline-{os.getuid()}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_unused(left)
    path, lock = _locked_folder(prefix)
    try:
        yield path
    finally:
        # Workers that are being killed may still write files; the next start removes them.
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked_folder(prefix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked: try again
            lock = _opened(path)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_if_unused(path: Path) -> None:
    # An OSError: it is removed, another user's, or in use, or its file system has no locks.
    with contextlib.suppress(OSError):
        lock = _opened(path)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
