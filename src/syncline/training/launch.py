"""Starting the workers on this host, with torch's elastic launcher, as torchrun does."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import msgspec
from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from syncline import errors
from syncline.errors import PeerError, SynclineError
from syncline.processes import ENDING_SIGNALS, end_of, restored_signals, threads_a_worker
from syncline.training.config import TrainingConfig
from syncline.training.worker import Failure

__all__ = ["error_of", "launch"]

MONITOR_INTERVAL_S = 0.1
SHUTDOWN_S = 10
"""Workers that do not end this long after SIGTERM are killed."""

ADVICE = "all workers were stopped; start again, with --resume if there is a checkpoint"


def launch(config: TrainingConfig, *, program: str = "syncline.training.worker") -> None:
    """Train with ``config.workers`` processes on this host; return when all are done.

    As soon as one of them ends with an error, the others are ended.

    Args:
        config: what to train; the argument of every worker.
        program: the module that a worker runs.

    Raises:
        SynclineError: the error of the worker that failed, in its own class.
        PeerError: a worker was killed; the message names its rank and the signal.
        KeyboardInterrupt: on Ctrl-C, after all workers have ended.
        SystemExit: the same, on SIGTERM, SIGHUP and SIGQUIT.
    """
    with ExitStack() as stack:
        stack.enter_context(_quiet_elastic())
        stack.enter_context(restored_signals())
        stack.enter_context(_environment(threads_a_worker(config.workers, os.environ)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-train-"))
        start = elastic_launch(_launch_config(config.workers, folder), sys.executable)
        try:
            # -P: a module in the working folder must not take the place of one of Python's.
            start("-P", "-m", program, msgspec.json.encode(config).decode())
        except ChildFailedError as error:
            _restore_terminal()
            # Not "from error": its text repeats, at length, what ours says.
            raise error_of(error.failures) from None
        except SignalException as error:
            _restore_terminal()
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None


def _launch_config(workers: int, folder: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # port 0: any free one
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        signals_to_handle=",".join(s.name for s in ENDING_SIGNALS),
    )


def error_of(failures: dict[int, ProcessFailure]) -> SynclineError:
    """Return the error that stands for the failed workers: the cause, not its consequences."""
    rank = min(failures, key=lambda r: (_remoteness(failures[r]), r))
    failure = failures[rank]
    told = _told(failure)
    if told is None:
        return PeerError(f"{_end_of(rank, failure)}; {ADVICE}")
    if told.traceback is not None:
        print(told.traceback, file=sys.stderr, end="")
        return SynclineError(f"worker {rank} failed: {told.message}")
    kind = getattr(errors, told.kind)
    if kind is PeerError:
        return PeerError(f"worker {rank}: {told.message}; {ADVICE}")
    error = kind(told.message)
    assert isinstance(error, SynclineError)
    return error


def _remoteness(failure: ProcessFailure) -> int:
    """Return how far the end of a worker is from the cause of all ends; 0 is the cause."""
    told = _told(failure)
    if told is None:
        # The launcher itself ends the survivors with SIGTERM.
        return 3 if failure.exitcode == -signal.SIGTERM else 0
    return 2 if told.kind == PeerError.__name__ else 1


def _told(failure: ProcessFailure) -> Failure | None:
    """Return what the worker wrote before it ended, or None if it could not."""
    if "kind" not in failure.error_file_data:
        return None
    return msgspec.convert(failure.error_file_data, Failure)


def _end_of(rank: int, failure: ProcessFailure) -> str:
    silent = "" if failure.exitcode < 0 else " and no message"
    return f"worker {rank} {end_of(failure.exitcode)}{silent}"


def _restore_terminal() -> None:
    """Show the cursor again, which the live progress of a killed worker has hidden."""
    if sys.stderr.isatty():
        Console(stderr=True).show_cursor(True)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the workers, which inherit the environment."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep the elastic agent's log to itself: the errors raised here say it shorter."""
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed")
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
