"""Runs one command as the workers of a cluster, and watches them until all have ended."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from syncline.lab.processes import end_of, exit_code_of, place_variables, threads_a_worker
from syncline.lab.testbed.cluster import DEVICE, PORT, Cluster
from syncline.lab.testbed.control import Place, Process
from syncline.lab.testbed.output import Lines
from syncline.plan.document import Value

TIMED_OUT = 124  # exit code of a job that took too long: that of timeout(1)


class WorkerEnd(Value, frozen=True, kw_only=True):
    """How one worker ended."""

    rank: int
    host: int
    code: int  # its exit code, or minus the number of the signal that ended it
    after_s: float
    stopped: bool  # whether it had been sent a signal to end before it ended


def name_of(end: WorkerEnd) -> str:
    """Return what a worker is called: ``rank 3 on host1``."""
    return f"rank {end.rank} on host{end.host}"


class JobResult(Value, frozen=True, kw_only=True):
    """How a job ended."""

    ends: tuple[WorkerEnd, ...]  # by rank
    stdout: tuple[str, ...] = ()  # by rank, where it was kept
    stderr: tuple[str, ...] = ()
    wall_s: float
    signal: int | None = None
    timed_out: bool = False

    @property
    def cause(self) -> WorkerEnd | None:
        """The worker that failed first without being stopped."""
        failed = [end for end in self.ends if end.code != 0 and not end.stopped]
        return min(failed, key=lambda end: end.after_s, default=None)

    @property
    def exit_code(self) -> int:
        """What a shell should see: 0 only if every worker has ended with 0."""
        if self.signal is not None:
            return exit_code_of(-self.signal)
        if self.cause is not None:
            return exit_code_of(self.cause.code)
        return TIMED_OUT if self.timed_out else 0


GRACE_S = 10.0  # for workers to end after another has failed, and again after a signal to end
DRAIN_S = 1.0  # how long to wait for output of processes that a worker has left behind
READ_BYTES = 1 << 16

Output = Callable[[int, bool, bytes], None]  # rank, whether standard error, line without its end
Notice = Callable[[str], None]  # takes a sentence about what has just happened


def worker_environment(
    cluster: Cluster, rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return variables for a worker; the threads and buffering that the user has set are kept."""
    each = cluster.workers_per_host
    place = place_variables(rank=rank, workers=cluster.workers, workers_per_host=each)
    meeting = {"MASTER_ADDR": cluster.address_of(0), "MASTER_PORT": str(PORT)}
    devices = {"GLOO_SOCKET_IFNAME": DEVICE, "NCCL_SOCKET_IFNAME": DEVICE}
    # Otherwise Python buffers lines when it does not write to a terminal.
    streams = {} if "PYTHONUNBUFFERED" in environment else {"PYTHONUNBUFFERED": "1"}
    threads = threads_a_worker(cluster.workers, environment)
    return {**streams, **threads, **place, **meeting, **devices}


class Job(AbstractContextManager["Job"]):
    """The running workers, their output, and the signals that are still to be sent to them."""

    def __init__(self, cluster: Cluster, output: Output, notice: Notice, grace_s: float) -> None:
        self._cluster = cluster
        self._output = output
        self._notice = notice
        self._grace_s = grace_s
        self._selector = selectors.DefaultSelector()
        self._began_ns = time.monotonic_ns()
        self._running: dict[int, Process] = {}
        self._ends: dict[int, WorkerEnd] = {}
        self._stopped_at_ns: int | None = None  # when workers first got a signal to end
        self._scheduled: list[tuple[float, int]] = []
        """Signals still to be sent: when, in monotonic seconds, and which."""
        self._signal: int | None = None
        self._timed_out = False

    def __exit__(self, *_: object) -> None:
        for key in self._streams:
            os.close(key.fd)
        self._selector.close()
        for process in self._running.values():
            process.close()

    @property
    def _streams(self) -> list[selectors.SelectorKey]:
        return [key for key in self._selector.get_map().values() if isinstance(key.data, _Stream)]

    def listen(self, signals: socket.socket) -> bool:
        """Read signals from here; return whether one came before any worker was started."""
        self._selector.register(signals, selectors.EVENT_READ, self._interrupt)
        self._step(time.monotonic())
        return self._signal is not None

    def start(
        self, rank: int, host: Place, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Start a worker; raises as :meth:`Place.start` does."""
        pipes = [os.pipe(), os.pipe()]
        for error, (reading, _) in enumerate(pipes):
            stream = _Stream(rank, bool(error), Lines())
            self._selector.register(reading, selectors.EVENT_READ, stream)
        try:
            process = host.start(
                command, environment=environment, stdout=pipes[0][1], stderr=pipes[1][1]
            )
        finally:
            for _, writing in pipes:
                os.close(writing)
        self._running[rank] = process
        self._selector.register(process, selectors.EVENT_READ, rank)

    def wait(self, timeout_s: float | None) -> JobResult:
        """Wait until all workers have ended; return how they ended, without their output."""
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._running:
            self._step(give_up_s)
            if give_up_s is not None and time.monotonic() >= give_up_s and self._running:
                self._timed_out, give_up_s = True, None
                self._stop(signal.SIGTERM)
        wall_s = (time.monotonic_ns() - self._began_ns) * 1e-9
        drained_s = time.monotonic() + DRAIN_S
        while self._streams and time.monotonic() < drained_s:
            self._step(drained_s)
        for key in self._streams:
            self._say(key.data, key.data.lines.finish())
        return JobResult(
            ends=tuple(self._ends[rank] for rank in sorted(self._ends)),
            wall_s=wall_s,
            signal=self._signal,
            timed_out=self._timed_out,
        )

    def _step(self, until_s: float | None) -> None:
        """Handle events until a scheduled signal or ``until_s`` is due; send signals that are."""
        due_s = [when for when, _ in self._scheduled] + ([] if until_s is None else [until_s])
        wait_s = None if not due_s else max(0.0, min(due_s) - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if isinstance(key.data, _Stream):
                self._read(key.fd, key.data)
            elif isinstance(key.data, int):
                self._end(key.data)
            else:
                for number in key.fileobj.recv(READ_BYTES):  # type: ignore[union-attr]
                    self._interrupt(number)
        now_s = time.monotonic()
        for scheduled in [each for each in self._scheduled if each[0] <= now_s]:
            self._scheduled.remove(scheduled)
            self._send(scheduled[1])

    def _read(self, descriptor: int, stream: _Stream) -> None:
        data = os.read(descriptor, READ_BYTES)
        if data:
            self._say(stream, stream.lines.feed(data, time.monotonic()))
            return
        self._say(stream, stream.lines.finish())
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def _say(self, stream: _Stream, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._output(stream.rank, stream.error, line)

    def _end(self, rank: int) -> None:
        process = self._running[rank]
        self._selector.unregister(process)
        code = process.wait(0)
        del self._running[rank]
        stopped_ns = self._stopped_at_ns
        self._ends[rank] = WorkerEnd(
            rank=rank,
            host=rank // self._cluster.workers_per_host,
            code=code,
            after_s=(process.ended_at_ns - self._began_ns) * 1e-9,
            stopped=stopped_ns is not None and process.ended_at_ns >= stopped_ns,
        )
        if code != 0 and not self._scheduled and stopped_ns is None:
            now_s = time.monotonic()
            self._scheduled = [
                (now_s + self._grace_s, signal.SIGTERM),
                (now_s + 2 * self._grace_s, signal.SIGKILL),
            ]
            self._notice(f"{name_of(self._ends[rank])} {end_of(code)}{self._others()}")

    def _interrupt(self, number: int) -> None:
        if self._signal is None:
            self._signal = number
            self._stop(number)
            if self._running:
                name = signal.Signals(number).name
                self._notice(f"{name} was passed on{self._others()}; once more kills them")
        else:
            self._send(signal.SIGKILL)

    def _others(self) -> str:
        running = len(self._running)
        if not running:
            return ""
        return f"; {running} worker{'s have' if running > 1 else ' has'} {self._grace_s:g} s to end"

    def _stop(self, number: int) -> None:
        """Tell all workers to end; kill those that have not done so in time."""
        self._send(number)
        self._scheduled = [(time.monotonic() + self._grace_s, signal.SIGKILL)]

    def _send(self, number: int) -> None:
        if self._stopped_at_ns is None:
            self._stopped_at_ns = time.monotonic_ns()
        for process in self._running.values():
            process.send_signal(number)


class _Stream(NamedTuple):
    """One of a worker's two streams."""

    rank: int
    error: bool
    lines: Lines
