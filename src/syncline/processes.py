"""How worker processes are started and how they ended: what every launcher of ours shares."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

__all__ = [
    "ENDING_SIGNALS",
    "end_of",
    "exit_code_of",
    "place_variables",
    "received_signals",
    "restored_signals",
    "threads_a_worker",
]

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those on which a launcher ends its workers."""


def threads_a_worker(workers: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that share out the cores; none where the user has set them."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"OMP_NUM_THREADS": str(max(1, (cores or 1) // workers))}


def place_variables(
    *, rank: int, workers: int, workers_per_host: int, address: str, port: int
) -> dict[str, str]:
    """Return the variables by which torchrun tells a worker its place among the others.

    Args:
        rank: of the worker; ranks fill one host after the other.
        workers: of the job.
        workers_per_host: the same on every host.
        address: of rank 0's host, where the workers meet.
        port: where they meet.
    """
    host, local_rank = divmod(rank, workers_per_host)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers_per_host,
        "NODE_RANK": host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": workers // workers_per_host,
        "MASTER_PORT": port,
    }
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": address}


def end_of(code: int) -> str:
    """Return how a process ended, in words.

    Args:
        code: its exit code, or minus the number of the signal that ended it.
    """
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
def restored_signals(numbers: Iterable[signal.Signals] = ENDING_SIGNALS) -> Iterator[None]:
    """Put back the signal handlers that something replaces and leaves behind."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def received_signals(
    numbers: Iterable[signal.Signals] = ENDING_SIGNALS,
) -> Iterator[socket.socket]:
    """Yield a socket from which the numbers of signals are read, one a byte, instead of acting.

    Only the main thread can receive signals.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    with reading, writing, restored_signals(numbers):
        before = signal.set_wakeup_fd(writing.fileno())
        try:
            for number in numbers:
                signal.signal(number, lambda *_: None)
            yield reading
        finally:
            signal.set_wakeup_fd(before)
