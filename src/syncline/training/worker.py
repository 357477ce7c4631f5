"""A worker process of ``syncline train``: ``python -m syncline.training.worker CONFIG STORE``.

``CONFIG`` is a :class:`~syncline.training.config.TrainingConfig` as JSON, ``STORE`` a file through
which the workers find each other; torchrun's environment variables say which worker this is.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from syncline.errors import PeerError, SynclineError
from syncline.measure.exchange import is_lost_peer
from syncline.training.config import TrainingConfig
from syncline.training.loop import train
from syncline.training.progress import progress_on
from syncline.training.summary import summary_json, summary_text

__all__ = ["Failure", "is_lost_peer", "main", "run_worker", "telling_lost_peers"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker ended, as it tells the process that started it.

    ``message`` and ``timestamp`` are what torchrun reads from the file.
    """

    message: str
    timestamp: int
    """Seconds since 1970."""
    kind: str
    """Name of the class of the error."""
    exit_code: int
    traceback: str | None = None
    """None for an error whose message says all."""


def run_worker(config: TrainingConfig, store: str | None = None) -> None:
    """Train as one worker; rank 0 shows how it goes and prints the summary.

    Args:
        config: of the training.
        store: see :func:`~syncline.training.group.process_group`.

    Raises:
        SynclineError: as for :func:`~syncline.training.loop.train`; the loss of a peer, which torch
            reports in many ways, is a PeerError.
    """
    first = os.environ.get("RANK") == "0"
    with telling_lost_peers(config.timeout_s):
        run = train(config, progress_on(sys.stderr) if first else None, store)
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


def main(arguments: list[str], run: Callable[[TrainingConfig, str], None] = run_worker) -> int:
    """Do what the arguments say; return the exit code.

    Args:
        arguments: a configuration as JSON, and the store.
        run: what to do as one worker; by default to train.
    """
    config, store = arguments
    try:
        run(msgspec.json.decode(config, type=TrainingConfig), store)
    except Exception as error:
        _report(error)
        return error.exit_code if isinstance(error, SynclineError) else 1
    return 0


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
