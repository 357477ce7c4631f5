"""Real worker processes with a real process group, kept from test to test.

They are forks of a process that has imported torch (see :mod:`tests.mortal`). Each job gets a fresh
process group over a file store, so nothing of one test reaches the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from syncline.errors import SynclineError, UserError
from syncline.lab.workers import WorkerGroup, serve
from tests.mortal import Mortals
from tests.timeouts import DEADLINE_S, JOB_DEADLINE_S, TIMEOUT


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A function of a module to call in a process group."""

    module: str
    name: str
    arguments: bytes  # pickled, as is what it returns
    workers: int
    backend: str
    store: str


class WorkerError(AssertionError):
    """A job failed on a worker; the message holds its traceback."""


class WorkerPool:
    """Worker processes that run functions of test modules under a process group.

    Args:
        forks: starts them.
    """

    def __init__(self, forks: Mortals) -> None:
        self._forks = forks
        self._stack = contextlib.ExitStack()
        self._group: WorkerGroup | None = None
        # One folder for as long as the workers live: a FileStore without it ends the process in
        # its destructor, which runs whenever the last reference goes.
        self._folder = Path()
        self._started = 0
        self._jobs = 0

    def run(
        self, job: Callable[..., Any], workers: int, *args: Any, backend: str = "gloo"
    ) -> list[Any]:
        """Run ``job(*args)`` on every worker; return each rank's result, in order of rank.

        Args:
            job: a function of a module.
            workers: how many.
            args: what can be pickled.
            backend: of the process group.

        Raises:
            WorkerError: it raised on a rank, or did not end within the deadline.
        """
        group = self._group_of(workers)
        self._jobs += 1
        order = Job(
            module=job.__module__,
            name=job.__name__,
            arguments=pickle.dumps(args),
            workers=workers,
            backend=backend,
            store=str(self._folder / f"store-{self._jobs}"),
        )
        try:
            answers = group.ask(
                order,
                bytes,
                timeout_s=JOB_DEADLINE_S,
                overdue=f"{job.__name__} did not end within {JOB_DEADLINE_S} s",
                ranks=workers,
            )
        except SynclineError as error:
            self.close()  # the others may hang in a collective
            notes = getattr(error, "__notes__", [])
            raise WorkerError("\n".join([str(error), *notes])) from None
        return [pickle.loads(answer) for answer in answers]

    def _group_of(self, workers: int) -> WorkerGroup:
        """Return the group, with at least so many workers."""
        if self._group is None:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._group = self._stack.enter_context(WorkerGroup(self._folder))
        while self._started < workers:
            rank = self._started
            self._group.start(self._forks, [self._group.path, str(rank)], {}, rank=rank, shown=True)
            self._started += 1
        self._group.gather(self._started)
        return self._group

    def close(self) -> None:
        """Stop all workers."""
        self._stack.close()
        self._group, self._started = None, 0


def serve_jobs(path: str, rank: int) -> None:
    """Carry out jobs in this process until the pool is closed."""
    import torch
    import torch.distributed as dist

    import syncline  # noqa: F401 - the backend of its name
    from syncline.train import log

    if not sys.warnoptions:
        warnings.simplefilter("error")
    torch.set_num_threads(1)

    def act(job: Job, _: object) -> bytes:
        # Where every thread of every rank hangs, before the first wait of one gives up.
        faulthandler.dump_traceback_later(0.95 * DEADLINE_S)
        # Groups of earlier jobs that garbage still holds: each wakes a thread 100 times a second.
        gc.collect()
        try:
            dist.init_process_group(
                job.backend,
                init_method=f"file://{job.store}",
                rank=rank,
                world_size=job.workers,
                timeout=TIMEOUT,
            )
            torch.manual_seed(0)
            # Nothing that one test has found or trained is remembered in another.
            os.environ["XDG_CACHE_HOME"] = f"{job.store}-cache"
            log._models.clear()
            called = getattr(importlib.import_module(job.module), job.name)
            result = called(*pickle.loads(job.arguments))
            # NCCL warns if it has to guess the device.
            dist.barrier(
                device_ids=[torch.cuda.current_device()] if job.backend == "nccl" else None
            )
            return pickle.dumps(result)
        except BaseException:
            raise UserError(f"rank {rank}:\n{traceback.format_exc()}") from None
        finally:
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    serve(path, rank, Job, act)
