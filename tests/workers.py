"""Real worker processes with a real process group, kept from test to test.

Starting a Python process with torch takes seconds; the pool starts them once a session. Each job
gets a fresh process group over a file store, so nothing of one test reaches the next.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing as mp
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

JOB_TIMEOUT_S = 120.0
GROUP_TIMEOUT_S = 60.0


class WorkerError(AssertionError):
    """A job failed on a worker; the message holds its traceback."""


class WorkerPool:
    """Worker processes that run functions of test modules under a process group."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        # One folder for as long as the workers live: a FileStore without it ends the process in
        # its destructor, which runs whenever the last reference goes.
        self._folder: tempfile.TemporaryDirectory[str] | None = None
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
        while len(self._workers) < workers:
            self._start()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
        self._jobs += 1
        store = os.path.join(self._folder.name, f"store-{self._jobs}")  # noqa: PTH118
        for rank in range(workers):
            message = (job.__module__, job.__name__, args, rank, workers, backend, store)
            try:
                self._workers[rank][1].send(message)
            except BrokenPipeError as error:
                self.close()
                raise WorkerError(f"rank {rank}'s process died after its last job") from error
        answers = self._collect(workers, job.__name__)
        failures = [f"rank {rank}:\n{a[1]}" for rank, a in enumerate(answers) if not a[0]]
        if failures:
            self.close()  # the others may hang in a collective
            raise WorkerError("\n".join(failures))
        return [answer[1] for answer in answers]

    def _collect(self, workers: int, name: str) -> list[tuple[bool, Any]]:
        waiting = {self._workers[rank][1]: rank for rank in range(workers)}
        answers: dict[int, tuple[bool, Any]] = {}
        while waiting:
            ready = wait(list(waiting), timeout=JOB_TIMEOUT_S)
            if not ready:
                ranks = sorted(waiting.values())
                self.close()
                raise WorkerError(f"{name}: ranks {ranks} gave no answer in {JOB_TIMEOUT_S} s")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type, call-overload]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, "the process died")
            if any(not ok for ok, _ in answers.values()):
                # Give the others a moment to fail by themselves, then stop waiting for them.
                for connection in wait(list(waiting), timeout=2.0):
                    rank = waiting.pop(connection)  # type: ignore[arg-type, call-overload]
                    with contextlib.suppress(EOFError):
                        answers[rank] = connection.recv()  # type: ignore[union-attr]
                for rank in waiting.values():
                    answers[rank] = (False, "still waiting when another rank failed")
                break
        return [answers.get(rank, (False, "no answer")) for rank in range(workers)]

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def close(self) -> None:
        """Stop all workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join(5)
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    import syncline  # noqa: F401 - the backend of its name

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    while True:
        try:
            module, name, args, rank, workers, backend, store = connection.recv()
        except (EOFError, OSError):
            return
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=workers,
                timeout=timedelta(seconds=GROUP_TIMEOUT_S),
            )
            torch.manual_seed(0)
            result = getattr(importlib.import_module(module), name)(*args)
            dist.barrier()
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
