"""A worker process of ``syncline train``: ``python -m syncline.training.worker CONFIG``.

``CONFIG`` is a :class:`~syncline.training.config.TrainingConfig` as JSON; torchrun's environment
variables say which worker this is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from syncline.errors import PeerError, SynclineError
from syncline.measure.lost import is_lost_peer
from syncline.training.config import TrainingConfig
from syncline.training.loop import train
from syncline.training.progress import progress_on
from syncline.training.summary import summary_json, summary_text

__all__ = ["Failure", "is_lost_peer", "main", "run_worker", "telling_lost_peers"]

PARENT_CHECK_S = 1.0


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker ended, as it tells the process that started it.

    ``message`` and ``timestamp`` are what torch's elastic agent reads from the file.
    """

    message: str
    timestamp: int
    """Seconds since 1970."""
    kind: str
    """Name of the class of the error."""
    exit_code: int
    traceback: str | None = None
    """None for an error whose message says all."""


def run_worker(config: TrainingConfig) -> None:
    """Train as one worker; rank 0 shows how it goes and prints the summary.

    Raises:
        SynclineError: as for :func:`~syncline.training.loop.train`; the loss of a peer, which torch
            reports in many ways, is a PeerError.
    """
    first = os.environ.get("RANK") == "0"
    with telling_lost_peers(config.timeout_s):
        run = train(config, progress_on(sys.stderr) if first else None)
    if first:
        print(summary_json(config, run) if config.json else summary_text(config, run), flush=True)


@contextmanager
def telling_lost_peers(timeout_s: float) -> Iterator[None]:
    """Let the loss of a peer, which torch reports in many ways, be a PeerError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SynclineError) or not is_lost_peer(error):
            raise
        raise PeerError(
            f"the connection to another worker was lost, or it did not answer within "
            f"{timeout_s:g} s (--timeout): {str(error).splitlines()[0]}"
        ) from error


def main(arguments: list[str], run: Callable[[TrainingConfig], None] = run_worker) -> int:
    """Do what the arguments say; return the exit code.

    Args:
        arguments: a configuration as JSON.
        run: what to do as one worker; by default to train.
    """
    # The launcher passes Ctrl-C on. A worker has nothing to tidy up (a checkpoint is whole or not
    # there), and the default action ends it inside a collective too, where Python's handler would
    # have to wait for it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        run(msgspec.json.decode(arguments[0], type=TrainingConfig))
    except Exception as error:
        _report(error)
        return error.exit_code if isinstance(error, SynclineError) else 1
    return 0


def _end_with(parent: int) -> None:
    """End this process when the launcher was killed and could not end it."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _report(error: Exception) -> None:
    known = isinstance(error, SynclineError)
    failure = Failure(
        message=str(error) if known else f"{type(error).__name__}: {error}",
        timestamp=int(time.time()),
        kind=type(error).__name__,
        exit_code=error.exit_code if isinstance(error, SynclineError) else 1,
        traceback=None if known else "".join(traceback.format_exception(error)),
    )
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        print(failure.traceback or f"error: {failure.message}", file=sys.stderr)
        return
    partial = Path(f"{path}.partial")
    partial.write_bytes(msgspec.json.encode(failure))
    partial.replace(path)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: threads of a process group whose peers are gone would hold up the interpreter.
    os._exit(code)
