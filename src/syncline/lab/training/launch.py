"""Starting the workers on this host."""

from __future__ import annotations

import os
import socket
import sys

from rich.console import Console

from syncline.errors import PeerError
from syncline.lab.processes import ended_by_signals, place_variables, run_folder, threads_a_worker
from syncline.lab.training.config import TrainingConfig
from syncline.lab.workers import ThisHost, WorkerGroup, module_command

ADVICE = "all workers were stopped; start again, with --resume if there is a checkpoint"


def launch(config: TrainingConfig, *, program: str = "syncline.lab.training.worker") -> None:
    """Train with ``config.workers`` processes on this host; return when all are done.

    As soon as one of them fails, the others are ended. They find each other through a file that
    only this user can read, and listen on the loopback device only, unless the user names another.

    ``program`` is the module that a worker runs, with ``config`` as its order.

    Raises:
        SynclineError: the error of the worker that failed, in its own class.
        PeerError: a worker was killed; the message names its rank and the signal.
        KeyboardInterrupt: on Ctrl-C, after all workers have ended.
        SystemExit: the same, on SIGTERM, SIGHUP and SIGQUIT.
    """
    count = config.workers
    with ended_by_signals(), run_folder() as folder:
        store = folder / "store"
        store.touch(mode=0o600)
        loopback = socket.if_indextoname(1)  # in every network namespace the first
        environment = {
            **threads_a_worker(count, os.environ),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", loopback),
            "TMPDIR": str(folder),
        }
        try:
            with WorkerGroup(folder) as workers:
                command = module_command(program, workers.path, str(store))
                for rank in range(count):
                    place = place_variables(rank=rank, workers=count, workers_per_host=count)
                    variables = {**environment, **place}
                    workers.start(ThisHost(), command, variables, rank=rank, shown=True)
                workers.gather(count)
                workers.ask(config, None, timeout_s=None)
        except PeerError as error:
            raise PeerError(f"{error}; {ADVICE}") from None
        finally:
            if sys.stderr.isatty():  # the live progress of a killed worker has hidden the cursor
                Console(stderr=True).show_cursor(True)
