"""Worker processes that take orders: started, asked and ended together.

Each worker connects to a socket of the leading process, sends its rank, and then carries out one
order after another until the connection is closed. The socket lies in the file system, which
emulated hosts share.

MPI launchers call ``python -m syncline.lab.workers SOCKET HOST COMMAND...`` in place of ssh. This
agent has the leading process start the command on an emulated host. It runs until that process
closes the connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, NoReturn, Protocol, Self

import msgspec

from syncline import errors
from syncline.errors import PeerError, SynclineError
from syncline.lab.processes import LocalProcess, end_of

START_S = 120.0  # how long all workers may take to start and connect
FAILURE_GRACE_S = 0.5  # after a failure, for other workers to report what may be its cause
END_S = 10.0  # how long workers may take to end by themselves before they are killed
OUTPUT_BYTES, OUTPUT_LINES = 4000, 20  # the end of a lost worker's output, for the error

Progress = Callable[[str, int, int], None]  # what is being done, parts done, parts in all


class Running(Protocol):
    """A started process, for ``select`` too: it becomes readable once it has ended."""

    def fileno(self) -> int:
        """Return the descriptor to select on."""

    def terminate(self) -> None:
        """Send SIGTERM to it and all that it has started."""

    def close(self, deadline_s: float) -> int:
        """Wait until the deadline (monotonic clock), then kill it; return the exit code."""


class Host(Protocol):
    """Somewhere to start processes: this host, or an emulated one."""

    name: str

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int | None,
        stderr: int | None,
    ) -> Running:
        """Start a command; ``environment`` is added to the variables of this process."""


class ThisHost:
    """The host of this process."""

    name = "localhost"
    start = LocalProcess


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module of ours."""
    # -P: a module in the working folder must not shadow one of Python's.
    return [python, "-P", "-m", module, *arguments]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a worker."""

    rank: int


class Remote(msgspec.Struct, frozen=True, tag="remote"):
    """The first message of an MPI's agent: run a command on another host."""

    host: str
    command: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker could not carry out an order."""

    message: str
    kind: str
    traceback: str | None = None  # None if the message says all


class Reply(msgspec.Struct, frozen=True):
    """A message of a worker about the order that it carries out."""

    kind: Literal["answer", "progress", "failure"]
    body: msgspec.Raw


class Lost(NamedTuple):
    """A worker that has ended."""

    code: int | None  # None if its process is unknown because an MPI's launcher started it
    output: str = ""


class _Started(NamedTuple):
    """A process of this group of workers."""

    process: Running
    rank: int | None  # None for an MPI's launcher, which starts several ranks
    output: IO[bytes] | None


class WorkerGroup:
    """Worker processes, each with a rank; on exit all of them have ended.

    ``folder`` holds their socket. ``name`` is what errors call a worker. ``hosts`` are those on
    which an MPI's launcher may start ranks, by name.
    """

    def __init__(
        self, folder: Path, *, name: str = "worker", hosts: Mapping[str, Host] | None = None
    ) -> None:
        self.name = name
        self.path = str(folder / f"{name.replace(' ', '-')}.socket")
        self._hosts = hosts or {}
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._started: list[_Started] = []
        self._ranks: dict[int, Connection] = {}
        self._agents: list[Connection] = []
        self._busy = False  # whether workers may still be starting, or carrying out an order

    def __enter__(self) -> Self:
        with _address(self.path) as address:
            self._listening.bind(address)
        self._listening.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for connection in (*self._ranks.values(), *self._agents):
            connection.close()
        self._listening.close()
        Path(self.path).unlink(missing_ok=True)
        if kind is not None or self._busy:
            for started in self._started:
                started.process.terminate()
        deadline_s = time.monotonic() + END_S
        for started in self._started:
            started.process.close(deadline_s)
            if started.output is not None:
                started.output.close()

    def start(
        self,
        host: Host,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        rank: int | None = None,
        shown: bool = False,
    ) -> None:
        """Start a process that is to connect to :attr:`path`, with additional variables.

        ``rank`` is None for an MPI's launcher, which starts several workers. With ``shown`` the
        process writes to this process's output; otherwise an error quotes the end of its output.
        """
        with contextlib.ExitStack() as stack:
            output = None if shown else stack.enter_context(tempfile.TemporaryFile())
            stream = None if output is None else output.fileno()
            process = host.start(command, environment=environment, stdout=stream, stderr=stream)
            self._started.append(_Started(process, rank, output))
            stack.pop_all()

    def gather(self, ranks: int, *, timeout_s: float = START_S, overdue: str | None = None) -> None:
        """Wait until all ``ranks`` workers have connected; ``overdue`` is the error if late."""
        self._busy = True
        deadline_s = time.monotonic() + timeout_s
        while len(self._ranks) < ranks:
            processes = [started.process for started in self._started]
            ready = _ready([self._listening, *processes], max(deadline_s - time.monotonic(), 0))
            if self._listening in ready:
                self._accept()
            elif ready:
                ended = next(s for s in self._started if s.process in ready)
                raise error_of(self.name, {ended.rank or 0: self._lost(ended)})
            else:
                raise PeerError(overdue or f"{self.name}s did not start within {timeout_s:g} s")
        self._busy = False

    def _accept(self) -> None:
        accepted, _ = self._listening.accept()
        connection = Connection(accepted.detach())
        try:
            greeting = msgspec.json.decode(connection.recv_bytes(), type=Hello | Remote)
        except (EOFError, OSError):
            return  # its process has ended, which the caller notices
        if isinstance(greeting, Hello):
            self._ranks[greeting.rank] = connection
            return
        self._agents.append(connection)  # an agent runs until its connection is closed
        host = self._hosts.get(greeting.host, ThisHost())
        self.start(host, ["sh", "-c", greeting.command], {})

    def ask(
        self,
        order: msgspec.Struct,
        kind: Any,
        *,
        timeout_s: float | None,
        overdue: str = "an order was not carried out in time",
        progress: Progress | None = None,
        ranks: int | None = None,
    ) -> list[Any]:
        """Have all workers, or the first ``ranks``, carry out an order at once.

        Returns their answers, which are of type ``kind``, by rank. If they take longer than
        ``timeout_s``, ``overdue`` is the error; None sets no limit. ``progress`` is called with
        what workers report on the way.

        Raises:
            SynclineError: a worker failed; it has the class of the worker's error. Of several, the
                cause is raised, not the errors of workers that lost another worker.
            PeerError: a worker has ended, or it took too long.
        """
        assert not self._busy, "workers may still carry out an earlier order, which took too long"
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        waiting = {rank: self._ranks[rank] for rank in range(ranks or len(self._ranks))}
        encoded = msgspec.json.encode(order)
        for connection in waiting.values():
            with contextlib.suppress(OSError):  # it has ended, which is noticed below
                connection.send_bytes(encoded)
        answers: dict[int, Any] = {}
        failures: dict[int, Failure | Lost] = {}
        self._busy = True
        while waiting:
            wait_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0)
            replies = list(self._replies(waiting, wait_s))
            if not replies and deadline_s is not None and time.monotonic() >= deadline_s:
                if failures:
                    break
                missing = ", ".join(map(str, sorted(waiting)))
                raise PeerError(f"{overdue} (no answer from {self.name} {missing})")
            for rank, reply in replies:
                if isinstance(reply, Reply) and reply.kind == "progress":
                    if progress is not None:
                        progress(*msgspec.json.decode(reply.body, type=tuple[str, int, int]))
                    continue
                del waiting[rank]
                if isinstance(reply, Reply) and reply.kind == "answer":
                    answers[rank] = msgspec.json.decode(reply.body, type=kind)
                    continue
                if not failures:
                    deadline_s = time.monotonic() + FAILURE_GRACE_S
                if isinstance(reply, Reply):
                    failures[rank] = msgspec.json.decode(reply.body, type=Failure)
                else:
                    failures[rank] = reply
        self._busy = bool(waiting)
        if failures:
            raise error_of(self.name, failures)
        return [answers[rank] for rank in sorted(answers)]

    def _replies(
        self, waiting: Mapping[int, Connection], wait_s: float | None
    ) -> Iterator[tuple[int, Reply | Lost]]:
        """Yield what workers report, or that they have ended; wait at most ``wait_s`` for it."""
        started = [s for s in self._started if s.rank is None or s.rank in waiting]
        ready = _ready([*waiting.values(), *(s.process for s in started)], wait_s)
        spoken = {rank for rank, connection in waiting.items() if connection in ready}
        for rank in spoken:
            try:
                yield rank, msgspec.json.decode(waiting[rank].recv_bytes(), type=Reply)
            except (EOFError, OSError):
                own = next((s for s in self._started if s.rank == rank), None)
                yield rank, Lost(None) if own is None else self._lost(own)
        # A worker's child processes can keep its connection open after its end.
        for each in started:
            if each.process in ready:
                for rank in waiting if each.rank is None else [each.rank]:
                    if rank not in spoken and not waiting[rank].poll(0):
                        spoken.add(rank)
                        yield rank, self._lost(each)

    def _lost(self, started: _Started) -> Lost:
        code = started.process.close(time.monotonic() + 1)
        if started.output is None:
            return Lost(code)
        descriptor = started.output.fileno()
        start = max(os.fstat(descriptor).st_size - OUTPUT_BYTES, 0)
        text = os.pread(descriptor, OUTPUT_BYTES, start).decode(errors="replace")
        return Lost(code, "\n".join(text.splitlines()[-OUTPUT_LINES:]))


def _ready(sources: Sequence[Any], wait_s: float | None) -> list[Any]:
    """Return the sources that are readable; an empty list if none is within ``wait_s``."""
    return wait(sources, wait_s)


def error_of(name: str, failures: Mapping[int, Failure | Lost]) -> SynclineError:
    """Return the error of failed workers: of the likely cause, with the others as notes."""
    cause, *others = sorted(failures, key=lambda rank: (_remoteness(failures[rank]), rank))
    failure = failures[cause]
    if isinstance(failure, Failure) and failure.traceback is not None:
        print(failure.traceback, file=sys.stderr, end="")
    error = _error(f"{name} {cause}", failure)
    for rank in others:
        error.add_note(str(_error(f"{name} {rank}", failures[rank])))
    return error


def _error(worker: str, failure: Failure | Lost) -> SynclineError:
    if isinstance(failure, Lost):
        end = "was lost" if failure.code is None else end_of(failure.code)
        silent = " and no message" if failure.code is not None and failure.code >= 0 else ""
        said = f", and said:\n{failure.output}" if failure.output else silent
        return PeerError(f"{worker} {end}{said}")
    if failure.traceback is not None:
        return SynclineError(f"{worker} failed: {failure.message}")
    kind = getattr(errors, failure.kind, SynclineError)
    error = kind(f"{worker}: {failure.message}" if kind is PeerError else failure.message)
    assert isinstance(error, SynclineError)
    return error


def _remoteness(failure: Failure | Lost) -> int:
    """Return how far a failure is from the root cause; 0 is the cause itself."""
    if isinstance(failure, Lost):
        return 0
    return 2 if failure.kind == PeerError.__name__ else 1


@contextlib.contextmanager
def _address(path: str) -> Iterator[str]:
    """Yield a short path to a socket's file: an address has room for 107 bytes."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------ in the worker's process


def serve(path: str, rank: int, kind: Any, act: Callable[[Any, Progress], object]) -> None:
    """Carry out orders, of type ``kind``, until the leading process closes its socket ``path``.

    ``act`` carries out an order; its second argument reports progress to the leading process. If it
    raises an error, the answer is that error.
    """
    with _connected(path, Hello(rank)) as connection:

        def reply(kind: Literal["answer", "progress", "failure"], body: object) -> None:
            encoded = msgspec.Raw(msgspec.json.encode(body))
            connection.send_bytes(msgspec.json.encode(Reply(kind, encoded)))

        def progress(stage: str, done: int, total: int) -> None:
            reply("progress", (stage, done, total))

        while True:
            try:
                order = connection.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                answer = act(msgspec.json.decode(order, type=kind), progress)
            except Exception as error:
                reply("failure", _failure_of(error))
            else:
                reply("answer", answer)


def _failure_of(error: Exception) -> Failure:
    kind = type(error).__name__
    if isinstance(error, SynclineError):
        return Failure(message=str(error), kind=kind)
    lines = traceback.format_exception(error)
    return Failure(message=f"{kind}: {error}", kind=kind, traceback="".join(lines))


def _connected(path: str, greeting: Hello | Remote) -> Connection:
    with _address(path) as address:
        connection = Client(address)
    connection.send_bytes(msgspec.json.encode(greeting))
    return connection


def leave(code: int = 0) -> NoReturn:
    """Exit at once: without peers, threads of a process group would delay the exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _agent(path: str, *arguments: str) -> None:
    # Launchers put options of ssh before the host.
    host, *command = [w for i, w in enumerate(arguments) if i or not w.startswith("-")]
    with _connected(path, Remote(host, " ".join(command))) as connection:
        connection.poll(None)


if __name__ == "__main__":
    _agent(*sys.argv[1:])
