"""Starting the workers on this host."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console

from syncline import errors
from syncline.errors import PeerError, SynclineError
from syncline.processes import (
    Process,
    end_of,
    ended_by_signals,
    place_variables,
    run_folder,
    threads_a_worker,
)
from syncline.training.config import TrainingConfig
from syncline.training.worker import Failure

__all__ = ["End", "error_of", "launch"]

SETTLE_S = 0.5
"""Once a worker has failed, the others have so long to fail by themselves and say why: the first
to end may be one that has only lost another."""
SHUTDOWN_S = 10.0
"""Workers that do not end this long after SIGTERM are killed."""

ADVICE = "all workers were stopped; start again, with --resume if there is a checkpoint"


class End(msgspec.Struct, frozen=True):
    """How a worker ended."""

    code: int
    """Its exit code, or minus the number of the signal that ended it."""
    told: Failure | None = None
    """What it wrote before it ended, or None if it could not."""


def launch(config: TrainingConfig, *, program: str = "syncline.training.worker") -> None:
    """Train with ``config.workers`` processes on this host; return when all are done.

    As soon as one of them ends with an error, the others are ended. They find each other through a
    file that only this user can read, and listen on the loopback device only.

    Args:
        config: what to train; the argument of every worker.
        program: the module that a worker runs.

    Raises:
        SynclineError: the error of the worker that failed, in its own class.
        PeerError: a worker was killed; the message names its rank and the signal.
        KeyboardInterrupt: on Ctrl-C, after all workers have ended.
        SystemExit: the same, on SIGTERM, SIGHUP and SIGQUIT.
    """
    with ended_by_signals(), run_folder() as folder:
        try:
            ends = _run(config, program, folder)
        finally:
            _restore_terminal()
    failures = {rank: end for rank, end in ends.items() if end.code != 0}
    if failures:
        raise error_of(failures)


def _run(config: TrainingConfig, program: str, folder: Path) -> dict[int, End]:
    """Start all workers and wait for their ends."""
    store = folder / "store"
    store.touch(mode=0o600)
    reports = [folder / f"error-{rank}.json" for rank in range(config.workers)]
    told = [msgspec.json.encode(config).decode(), str(store)]
    # -P: a module in the working folder must not take the place of one of Python's.
    command = [sys.executable, "-P", "-m", program, *told]
    shared = {
        **threads_a_worker(config.workers, os.environ),
        **_loopback(os.environ),
        "TMPDIR": str(folder),
    }
    processes: dict[int, Process] = {}
    try:
        for rank, report in enumerate(reports):
            place = place_variables(
                rank=rank, workers=config.workers, workers_per_host=config.workers
            )
            environment = {**shared, **place, "TORCHELASTIC_ERROR_FILE": str(report)}
            processes[rank] = Process(command, environment)
        _wait(list(processes.values()))
    finally:
        for process in processes.values():
            process.terminate()
        deadline_s = time.monotonic() + SHUTDOWN_S
        codes = {rank: process.close(deadline_s) for rank, process in processes.items()}
    return {rank: End(code, _told(reports[rank])) for rank, code in codes.items()}


def _loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep sockets off the network, but for those that the user has set."""
    device = socket.if_indextoname(1)  # in every network namespace the first
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: device for name in names if name not in environment}


def _wait(running: list[Process]) -> None:
    """Return when all have ended, or ``SETTLE_S`` after one has failed."""
    until_s: float | None = None
    while running and (until_s is None or time.monotonic() < until_s):
        wait_s = None if until_s is None else max(until_s - time.monotonic(), 0)
        for process in select.select(running, [], [], wait_s)[0]:
            running.remove(process)
            if process.close(0) != 0 and until_s is None:
                until_s = time.monotonic() + SETTLE_S


def error_of(failures: Mapping[int, End]) -> SynclineError:
    """Return the error that stands for the failed workers: the cause, not its consequences."""
    rank = min(failures, key=lambda r: (_remoteness(failures[r]), r))
    failure = failures[rank]
    told = failure.told
    if told is None:
        silent = "" if failure.code < 0 else " and no message"
        return PeerError(f"worker {rank} {end_of(failure.code)}{silent}; {ADVICE}")
    if told.traceback is not None:
        print(told.traceback, file=sys.stderr, end="")
        return SynclineError(f"worker {rank} failed: {told.message}")
    kind = getattr(errors, told.kind)
    if kind is PeerError:
        return PeerError(f"worker {rank}: {told.message}; {ADVICE}")
    error = kind(told.message)
    assert isinstance(error, SynclineError)
    return error


def _remoteness(failure: End) -> int:
    """Return how far the end of a worker is from the cause of all ends; 0 is the cause."""
    if failure.told is None:
        # The launcher itself ends the survivors with SIGTERM.
        return 3 if failure.code == -signal.SIGTERM else 0
    return 2 if failure.told.kind == PeerError.__name__ else 1


def _told(report: Path) -> Failure | None:
    return msgspec.json.decode(report.read_bytes(), type=Failure) if report.exists() else None


def _restore_terminal() -> None:
    """Show the cursor again, which the live progress of a killed worker has hidden."""
    if sys.stderr.isatty():
        Console(stderr=True).show_cursor(True)
