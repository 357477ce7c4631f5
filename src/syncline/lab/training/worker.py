"""A worker process of ``syncline train``: ``python -m syncline.lab.training.worker SOCKET STORE``.

Its order is a :class:`~syncline.lab.training.config.TrainingConfig`. ``STORE`` is a file through
which the workers find each other; torchrun's environment variables say which worker this is.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.loop import train
from syncline.lab.training.progress import TrainingProgress
from syncline.lab.training.result import summary_json, summary_text
from syncline.lab.workers import leave, serve
from syncline.train.log import logger
from syncline.train.measure.exchange import telling_lost_peers


def run_worker(config: TrainingConfig, store: str | None = None) -> None:
    """Train as one worker; rank 0 shows the progress and prints the summary."""
    rank = os.environ.get("RANK")
    first = rank == "0"
    if not sys.stderr.isatty():
        # One line per epoch then says what runs, and the summary what was decided.
        logger.setLevel(logging.WARNING)
    with telling_lost_peers(f"while training (--timeout {config.timeout_s:g})", rank=rank):
        run = train(config, TrainingProgress(sys.stderr) if first else None, store)
    if first:
        print(summary_json(config, run) if config.json else summary_text(config, run), flush=True)


def main(run: Callable[[TrainingConfig, str], None] = run_worker) -> NoReturn:
    """Carry out the order of the launcher, by default to train as one worker, and exit."""
    path, store = sys.argv[1:]
    serve(path, int(os.environ["RANK"]), TrainingConfig, lambda config, _: run(config, store))
    leave()


if __name__ == "__main__":
    main()
