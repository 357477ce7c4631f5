"""``Crew``: processes of one kind, seen from the process that leads the benchmark."""

from __future__ import annotations

import contextlib
import select
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from syncline.bench.ground import Ground, Running
from syncline.bench.messages import (
    MOST_BYTES,
    Answer,
    Failed,
    Greeting,
    Hello,
    Lap,
    Order,
    Ready,
    Setup,
    receive,
    send,
)
from syncline.bench.mpi_launch import mpi_launch
from syncline.errors import PeerError

__all__ = ["Crew", "mpi_crew", "torch_crew", "worker_environment"]

START_S = 120.0
"""For all processes of a crew to start and say hello."""
LOOK_S = 0.2
"""How often to see whether one of them has ended instead."""
END_S = 10.0
"""For them to end by themselves before they are killed."""
END_AFTER_ERROR_S = 1.0
"""Likewise after an error or Ctrl-C, when they may be in the middle of something."""

Start = Callable[[str], list[Running]]
"""Starts the processes of a crew, which are to connect to a path."""


class Crew:
    """Processes of one kind, one a rank, that sleep until they are told to do a lap.

    Args:
        name: for errors.
        folder: for its socket.
        setup: what the processes are told.
        start: starts them.
        ground: where other hosts' commands are started.

    Raises:
        PeerError: on entry, if they do not start.
    """

    def __init__(self, name: str, folder: Path, setup: Setup, start: Start, ground: Ground) -> None:
        self.name = name
        self.version = ""
        self.ready = Ready()
        """What its rank 0 says of where it is."""
        self._path = folder / f"{name}.socket"
        self._setup = setup
        self._start = start
        self._ground = ground
        self._ranks: dict[int, socket.socket] = {}
        self._agents: list[socket.socket] = []
        self._stack = contextlib.ExitStack()
        self._processes: list[Running] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            stack.push(self._end)
            listening.bind(str(self._path))
            listening.listen(2 * self._setup.ranks)
            self._processes += self._start(str(self._path))
            self._gather(listening, time.monotonic() + START_S)
            for connection in self._ranks.values():
                send(connection, self._setup)
            self._meet()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _end(self, kind: type[BaseException] | None, *_: object) -> None:
        for connection in (*self._ranks.values(), *self._agents):
            connection.close()
        deadline_s = time.monotonic() + (END_S if kind is None else END_AFTER_ERROR_S)
        for process in self._processes:
            process.close(deadline_s)

    def _gather(self, listening: socket.socket, deadline_s: float) -> None:
        listening.settimeout(LOOK_S)
        while len(self._ranks) < self._setup.ranks:
            if time.monotonic() > deadline_s:
                raise self._lost(f"did not start within {START_S:g} s")
            if any(process.ended for process in self._processes):
                raise self._lost("ended before it began")
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            try:
                said = receive(connection, Greeting, START_S)
            except PeerError as error:
                raise self._lost(f"lost a process at its start ({error})") from error
            if isinstance(said, Hello):
                self._ranks[said.rank] = connection
                self.version = said.version
            else:
                self._agents.append(connection)  # an agent waits until its connection is closed
                command = ["sh", "-c", said.command]
                self._processes.append(self._ground.start_on(said.host, command))

    def _meet(self) -> None:
        """Wait until all processes have met each other."""
        for rank, connection in self._ranks.items():
            try:
                ready = receive(connection, Ready, START_S)
            except PeerError as error:
                raise self._lost(f"rank {rank} did not meet the others ({error})") from error
            if rank == 0:
                self.ready = ready

    def do(self, order: Order, timeout_s: float) -> list[Lap] | Failed:
        """Have all ranks do a lap at once; return what each measured, or why one could not.

        Raises:
            PeerError: a rank has ended, or did not answer in time.
        """
        for rank, connection in self._ranks.items():
            try:
                send(connection, order)
            except PeerError as error:
                raise self._lost(f"lost rank {rank}") from error
        deadline_s = time.monotonic() + timeout_s
        answers: dict[int, Lap | Failed] = {}
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._ranks.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while len(answers) < len(ranks):
            ready = poll.poll(max(deadline_s - time.monotonic(), 0) * 1e3)
            if not ready:
                missing = ", ".join(str(r) for r in self._ranks if r not in answers)
                raise self._lost(
                    f"did not end {order.contestant}'s {order.collective} of "
                    f"{order.size_bytes} bytes within {timeout_s:g} s (rank {missing})"
                )
            for descriptor, _ in ready:
                rank = ranks[descriptor]
                data = self._ranks[rank].recv(MOST_BYTES)
                if not data:
                    raise self._lost(f"lost rank {rank} in {order.contestant}'s turn")
                answers[rank] = msgspec.json.decode(data, type=Answer)
        failed = [answer for answer in answers.values() if isinstance(answer, Failed)]
        return failed[0] if failed else [a for a in answers.values() if isinstance(a, Lap)]

    def _lost(self, what: str) -> PeerError:
        said = [" ".join(process.said().split()) for process in self._processes]
        last = next((f"; it said: {text}" for text in said if text), "")
        return PeerError(f"{self.name} {what}{last}")


def worker_environment(ground: Ground, folder: Path) -> dict[str, str]:
    """Return variables for all workers, whose temporary files go to ``folder``."""
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": ground.interface,
        "UCX_NET_DEVICES": ground.interface,
        "TMPDIR": str(folder),
    }


def torch_crew(folder: Path, setup: Setup, ground: Ground, environment: Mapping[str, str]) -> Crew:
    """Return the crew of Syncline and of torch's backends."""

    def start(path: str) -> list[Running]:
        return [
            ground.start(rank, _worker(sys.executable, path, "torch", str(rank)), environment)
            for rank in range(setup.ranks)
        ]

    return Crew("torch", folder, setup, start, ground)


def mpi_crew(
    mpi: str,
    python: Path,
    folder: Path,
    setup: Setup,
    ground: Ground,
    environment: Mapping[str, str],
    *,
    tcp: bool,
) -> Crew:
    """Return the crew that an MPI's mpiexec starts."""

    def start(path: str) -> list[Running]:
        agent = folder / f"{mpi}-agent"
        call = [sys.executable, "-P", "-m", "syncline.bench.agent", path]
        agent.write_text(f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n')
        agent.chmod(0o700)
        launch = mpi_launch(mpi, python, setup.ranks, ground, tcp=tcp, agent=agent)
        command = [*launch.command, *_worker(str(python), path, mpi)]
        return [ground.start(0, command, {**environment, **launch.environment})]

    return Crew(mpi, folder, setup, start, ground)


def _worker(python: str, *arguments: str) -> Sequence[str]:
    # -P: a module in the working folder must not take the place of one of Python's.
    return [python, "-P", "-m", "syncline.bench.worker", *arguments]
